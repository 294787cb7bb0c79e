//! The file that is preloaded: its size, and the newest glibc that it asks of an image.
//!
//! ELF-64, little endian, as `elf(5)` and the generic ABI's "Symbol Versioning" (LSB Core, chapter
//! 10.7) describe it.

use anyhow::Context;

use crate::report::Report;
use crate::world::World;

/// `SHT_GNU_verneed`.
const VERSIONS_NEEDED: u32 = 0x6fff_fffe;

/// `2.17`, which is newer than `2.4`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Version(Vec<u32>);

impl Version {
    fn parse(symbol_version: &str) -> Option<Self> {
        let parts = symbol_version.strip_prefix("GLIBC_")?.split('.');
        parts.map(|part| part.parse().ok()).collect::<Option<_>>().map(Self)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&parts.join("."))
    }
}

/// Measures both.
///
/// # Errors
/// The file can't be read, or is no 64-bit ELF file with versions of needed symbols.
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let path = world.artefacts.path("libtessera.so");
    let file = std::fs::read(&path).with_context(|| format!("{}", path.display()))?;
    #[allow(clippy::cast_precision_loss, reason = "bytes far below 2^53")]
    report.figure("shim_kib", "the shim's file", "KiB", file.len() as f64 / 1024.0, 500.0);
    let max_glibc = max_glibc(&file).with_context(|| format!("{}", path.display()))?;
    let reached = max_glibc <= Version(vec![2, 17]);
    report.word("shim_max_glibc", "newest glibc it asks for", &max_glibc, "≤ 2.17", reached);
    Ok(())
}

/// The highest `GLIBC_x.y` among the versions of symbols that the file needs.
fn max_glibc(file: &[u8]) -> anyhow::Result<Version> {
    let names = needed_versions(file).context("no ELF file as a linker makes it")?;
    let versions = names.iter().filter_map(|name| Version::parse(name));
    versions.max().context("it needs no version of glibc")
}

/// Names of all versions that the file's symbols are needed in; `None` where it is malformed.
fn needed_versions(file: &[u8]) -> Option<Vec<String>> {
    if file.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (headers, size, count) = (long(file, 0x28)?, short(file, 0x3a)?, short(file, 0x3c)?);
    let section = |index: usize| {
        let header = usize::try_from(headers).ok()?.checked_add(size.checked_mul(index)?)?;
        let offset = usize::try_from(long(file, header + 0x18)?).ok()?;
        Some((word(file, header + 4)?, offset, word(file, header + 0x28)?))
    };
    let (_, needs, strings) =
        (0..count).filter_map(section).find(|(kind, ..)| *kind == VERSIONS_NEEDED)?;
    let (_, strings, _) = section(usize::try_from(strings).ok()?)?;
    let mut names = Vec::new();
    // One record for each library (Elf64_Verneed), with one for each version of it (Vernaux).
    let mut library = needs;
    loop {
        let mut version = library + usize::try_from(word(file, library + 8)?).ok()?;
        for _ in 0..short(file, library + 2)? {
            let name = strings + usize::try_from(word(file, version + 8)?).ok()?;
            let text = file.get(name..)?.split(|byte| *byte == 0).next()?;
            names.push(String::from_utf8_lossy(text).into_owned());
            version += usize::try_from(word(file, version + 12)?).ok()?;
        }
        match usize::try_from(word(file, library + 12)?).ok()? {
            0 => return Some(names),
            next => library += next,
        }
    }
}

fn bytes<const N: usize>(file: &[u8], at: usize) -> Option<[u8; N]> {
    file.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn short(file: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_le_bytes(bytes(file, at)?)))
}

fn word(file: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes(file, at)?))
}

fn long(file: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes(file, at)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_programs_own_needs_are_read_as_readelf_reads_them() {
        let own = std::env::current_exe().unwrap();
        let file = std::fs::read(&own).unwrap();
        let out = std::process::Command::new("readelf").arg("-VW").arg(&own).output().unwrap();
        let listing = String::from_utf8(out.stdout).unwrap();
        let names = listing.split_whitespace().filter_map(Version::parse);
        assert_eq!(max_glibc(&file).unwrap(), names.max().unwrap());
    }

    #[test]
    fn versions_compare_by_number() {
        assert!(Version::parse("GLIBC_2.17") > Version::parse("GLIBC_2.4"));
        assert_eq!(Version::parse("GLIBC_2.3.4").unwrap().to_string(), "2.3.4");
        assert_eq!(Version::parse("GLIBC_PRIVATE"), None);
    }

    #[test]
    fn a_file_cut_anywhere_is_an_error_and_no_panic() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for length in [0, 5, 6, 63, 64, own.len() / 2] {
            assert_eq!(needed_versions(&own[..length]), None, "{length}");
        }
    }
}

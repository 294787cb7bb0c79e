//! Where the files are that `tessera` was installed with.

use std::path::{Path, PathBuf};

use tessera_system::files;

/// A file or directory that comes with `tessera`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artefact {
    /// `libtessera.so`.
    Shim,
    /// The directory with the simulated driver libraries.
    Simulation,
    /// `tessera-tenant`, the demo's client.
    Tenant,
}

impl Artefact {
    fn what(self) -> &'static str {
        match self {
            Self::Shim => "the shim (libtessera.so)",
            Self::Simulation => "the simulated GPU (sim/libcuda.so.1)",
            Self::Tenant => "the demo's client (tessera-tenant)",
        }
    }

    /// The file that must exist, under a directory of candidates.
    fn marker(self) -> &'static str {
        match self {
            Self::Shim => "libtessera.so",
            Self::Simulation => "sim/libcuda.so.1",
            Self::Tenant => "tessera-tenant",
        }
    }

    /// What the caller wants: the file, or for the simulation its directory.
    fn wanted(self, base: &Path) -> PathBuf {
        match self {
            Self::Simulation => base.join("sim"),
            _ => base.join(self.marker()),
        }
    }
}

/// Finds `artefact`: as `given`, else beside this program, else under `../lib/tessera`.
///
/// # Errors
/// Names every place that was looked at.
pub fn find(artefact: Artefact, given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        let real = || {
            if artefact == Artefact::Shim {
                files::open(given)?;
            }
            Ok(given.canonicalize()?)
        };
        return real().map_err(|e: files::FileError| {
            anyhow::anyhow!("{} is not at {}: {e}", artefact.what(), given.display())
        });
    }
    let exe = std::env::current_exe().and_then(|exe| exe.canonicalize())?;
    let beside = exe.parent().unwrap_or(Path::new("/"));
    find_in(artefact, &[beside.to_owned(), beside.join("../lib/tessera")])
}

fn find_in(artefact: Artefact, bases: &[PathBuf]) -> anyhow::Result<PathBuf> {
    for base in bases {
        if base.join(artefact.marker()).is_file() {
            return Ok(artefact.wanted(&base.canonicalize()?));
        }
    }
    let looked: Vec<String> =
        bases.iter().map(|b| b.join(artefact.marker()).display().to_string()).collect();
    anyhow::bail!(
        "{} was not found; looked at {}. `make debug` and `make build` put it there",
        artefact.what(),
        looked.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_artefact_says_where_it_was_looked_for() {
        let bases = ["/nonexistent/bin".into(), "/nonexistent/lib".into()];
        let error = find_in(Artefact::Shim, &bases).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/bin/libtessera.so"), "{error}");
        assert!(error.contains("/nonexistent/lib/libtessera.so"), "{error}");
    }

    #[test]
    fn the_first_base_that_has_it_wins() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        std::fs::create_dir(base.join("sim")).unwrap();
        std::fs::write(base.join("sim/libcuda.so.1"), "").unwrap();
        let bases = ["/nonexistent".into(), base.clone()];
        assert_eq!(find_in(Artefact::Simulation, &bases).unwrap(), base.join("sim"));
    }

    #[test]
    fn a_given_file_must_exist() {
        let error = find(Artefact::Shim, Some(Path::new("/nonexistent/x.so"))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/x.so"), "{error}");
    }
}

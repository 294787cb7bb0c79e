//! Which version of the shared bytes a program speaks, and how others can tell.
//!
//! A tenant's side (the shim) speaks one version, its own. The plugin speaks its own and the one
//! before: containers that were started before an upgrade go on with the shim that they mounted, and
//! start again with it.

use crate::layout::ABI_VERSION;

/// What every program that links this crate carries, so that its file tells which version it speaks,
/// without being run. As it is read at run time, a test can raise it in a copy of the file.
#[repr(C)]
struct Mark {
    text: [u8; 16],
    /// Little-endian.
    version: [u8; 4],
}

#[used]
static MARK: Mark = Mark { text: *b"tessera page abi", version: ABI_VERSION.to_le_bytes() };

/// The version that this program speaks: [`ABI_VERSION`], unless its file says otherwise.
#[must_use]
pub fn version() -> u32 {
    // SAFETY: a valid, initialised static. Volatile, so that the file's word counts, not the compiler's.
    u32::from_le_bytes(unsafe { core::ptr::read_volatile(&raw const MARK.version) })
}

/// Whether the plugin can make and read pages of this version: its own and the one before.
#[must_use]
pub fn speaks(abi: u32) -> bool {
    let own = version();
    abi >= 1 && (abi == own || Some(own) == abi.checked_add(1))
}

/// The version that a program speaks, by the bytes of its file. Those from before there was a mark
/// speak 1.
#[must_use]
pub fn of_program(file: &[u8]) -> u32 {
    // Volatile, so that the compiler puts no second copy of the text into this program's file.
    // SAFETY: a valid, initialised static.
    let text = unsafe { core::ptr::read_volatile(&raw const MARK.text) };
    let at = file.windows(text.len()).position(|bytes| bytes == text);
    let version = at.and_then(|at| file.get(at + text.len()..)?.first_chunk().copied());
    version.map_or(1, u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_tells_its_version_by_its_file() {
        assert_eq!(version(), ABI_VERSION);
        assert_eq!(of_program(b"\x7fELF from before"), 1);
        assert_eq!(of_program(b"...tessera page abi\x07\0\0\0..."), 7);
        assert_eq!(of_program(b"cut off: tessera page abi\x07"), 1);
    }

    #[test]
    fn the_plugin_speaks_its_own_version_and_the_one_before() {
        let own = version();
        assert!(speaks(own) && !speaks(own + 1) && !speaks(0) && !speaks(u32::MAX));
        assert_eq!(speaks(own - 1), own > 1);
    }
}

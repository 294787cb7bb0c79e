//! Where the files are that `tessera` was installed with.

use std::path::{Path, PathBuf};

use tessera_system::files;

/// A file or directory that comes with `tessera`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Artefact {
    what: &'static str,
    /// The file that must exist, under a directory of candidates.
    marker: &'static str,
    /// What the caller wants, under the same.
    wanted: &'static str,
}

impl Artefact {
    pub const SHIM: Artefact = Artefact {
        what: "the shim (libtessera.so)",
        marker: "libtessera.so",
        wanted: "libtessera.so",
    };
    /// The directory with the simulated driver libraries.
    pub const SIMULATION: Artefact = Artefact {
        what: "the simulated GPU (sim/libcuda.so.1)",
        marker: "sim/libcuda.so.1",
        wanted: "sim",
    };
    pub const TENANT: Artefact = Artefact {
        what: "the demo's client (tessera-tenant)",
        marker: "tessera-tenant",
        wanted: "tessera-tenant",
    };
}

/// Finds `artefact`: as `given`, else beside this program, else under `../lib/tessera`.
///
/// # Errors
/// Names every place that was looked at.
pub fn find(artefact: Artefact, given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        let real = || {
            if artefact == Artefact::SHIM {
                files::open(given)?;
            }
            Ok(given.canonicalize()?)
        };
        return real().map_err(|e: files::FileError| {
            anyhow::anyhow!("{} is not at {}: {e}", artefact.what, given.display())
        });
    }
    let exe = std::env::current_exe().and_then(|exe| exe.canonicalize())?;
    let beside = exe.parent().unwrap_or(Path::new("/"));
    find_in(artefact, &[beside.to_owned(), beside.join("../lib/tessera")])
}

fn find_in(artefact: Artefact, bases: &[PathBuf]) -> anyhow::Result<PathBuf> {
    for base in bases {
        if base.join(artefact.marker).is_file() {
            return Ok(base.canonicalize()?.join(artefact.wanted));
        }
    }
    let looked: Vec<String> =
        bases.iter().map(|b| b.join(artefact.marker).display().to_string()).collect();
    anyhow::bail!(
        "{} was not found; looked at {}. `make debug` and `make build` put it there",
        artefact.what,
        looked.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_artefact_says_where_it_was_looked_for() {
        let bases = ["/nonexistent/bin".into(), "/nonexistent/lib".into()];
        let error = find_in(Artefact::SHIM, &bases).unwrap_err().to_string();
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
        assert_eq!(find_in(Artefact::SIMULATION, &bases).unwrap(), base.join("sim"));
    }

    #[test]
    fn a_given_file_must_exist() {
        let error = find(Artefact::SHIM, Some(Path::new("/nonexistent/x.so"))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/x.so"), "{error}");
    }
}

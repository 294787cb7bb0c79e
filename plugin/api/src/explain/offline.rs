//! What can be explained without the plugin: the pages as they are, and a copy of the ledger.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::Facts;
use crate::admin;
use tessera_config::Config;
use tessera_model::audit::Event;
use tessera_model::record::Record;
use tessera_store::Ledger;
use tessera_system::files;
use tessera_tenant::regions;

/// As much as there is; `silence`: why the plugin does not answer.
pub(super) fn facts(config: &Config, silence: &str) -> Facts {
    let mut remarks = vec![format!(
        "the plugin does not answer at {} ({silence}); this is read from the ledger and the pages. GPUs and \
         GPU time are unknown; running pods keep their limits",
        config.paths.admin.display()
    )];
    let (records, trail) = match read(&config.paths.ledger) {
        Ok(read) => read,
        Err(error) => {
            remarks.push(error);
            Default::default()
        }
    };
    let status = admin::offline(config, String::new());
    let versions = regions::existing(&config.paths.pages).into_iter().filter_map(|id| {
        let dir = regions::dir(&config.paths.pages, &id);
        Some((id.to_string(), tessera_region::quota::abi_in(&dir)?))
    });
    Facts {
        page_versions: versions.collect(),
        status: tessera_kubelet_api::admin::StatusResponse { warnings: Vec::new(), ..status },
        records: records.into_iter().map(Arc::new).collect(),
        trail,
        config: Arc::new(config.clone()),
        gpus: Vec::new(),
        remarks,
        alone: true,
    }
}

/// Reads a copy: opening a ledger that a killed plugin left writes into it, which is the next plugin's
/// affair.
fn read(path: &Path) -> Result<(Vec<Record>, Vec<Event>), String> {
    let failed = |error: &dyn std::fmt::Display| {
        format!("the ledger {} cannot be read ({error}): there is no history", path.display())
    };
    let file = files::open(path).map_err(|error| failed(&error))?;
    if file.metadata().map_err(|error| failed(&error))?.len() > files::LEDGER {
        return Err(failed(&files::FileError::TooLarge(files::LEDGER)));
    }
    // As redb locks it; only one process may have it open.
    match file.try_lock_shared() {
        Ok(()) => {}
        Err(std::fs::TryLockError::WouldBlock) => {
            return Err(format!(
                "the ledger {} is in use by a plugin that does not answer on this socket: there is no \
                 history. Does --config name the plugin's configuration?",
                path.display()
            ));
        }
        Err(std::fs::TryLockError::Error(error)) => return Err(failed(&error)),
    }
    let copied = copy(file).map_err(|error| failed(&error))?;
    let (mut ledger, _) =
        Ledger::open(&copied.0.join("ledger.redb"), false).map_err(|error| failed(&error))?;
    let (records, _, _) = ledger.load().map_err(|error| failed(&error))?;
    let trail = ledger.history(usize::MAX).map_err(|error| failed(&error))?;
    Ok((records, trail))
}

/// A directory that goes when dropped.
struct Copied(std::path::PathBuf);

impl Drop for Copied {
    fn drop(&mut self) {
        // What is left in a directory for temporary files harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn copy(mut ledger: File) -> io::Result<Copied> {
    let template = std::env::temp_dir().join("tessera-explain.XXXXXX");
    let dir = Copied(nix::unistd::mkdtemp(&template)?);
    io::copy(&mut ledger, &mut File::create_new(dir.0.join("ledger.redb"))?)?;
    Ok(dir)
}

//! The installed shims that this node's containers mount: kept whole while they are needed, removed
//! once they are not.

use std::path::Path;
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use super::{AllocateError, Allocations};
use tessera_tenant::shim_install;
use tessera_tenant::shim_install::{PRELOAD, SHIM, unused};

impl Allocations {
    /// Sees to it that the shim of that name is there to be mounted, with the line that preloads it. A
    /// look at the files is enough here; their content is compared when the plugin starts.
    pub(super) fn ensure_shim(&self, name: Option<&str>) -> Result<(), AllocateError> {
        let Some(name) = name else { return Ok(()) };
        let path = self.paths.shim.join(name).join(SHIM);
        let there = |path: &Path| path.metadata().is_ok_and(|m| m.is_file() && m.len() > 0);
        if there(&path) && there(&path.with_file_name(PRELOAD)) {
            return Ok(());
        }
        match self.restore_shim(name) {
            Ok(_) => Ok(()),
            Err(error) => Err(AllocateError::Shim { path, error }),
        }
    }

    pub(super) fn restore_shim(&self, name: &str) -> Result<bool, shim_install::ShimError> {
        let paths = &self.paths;
        let source = paths.shim_source.clone().unwrap_or_else(shim_install::default_source);
        let restored = shim_install::restore(&source, &paths.shim, name);
        self.board.keep(name, "shim", &restored, ToString::to_string);
        let restored = restored?;
        if restored {
            self.pages.forget_shim(name);
            warn!(name, "a shim that containers mount was missing or damaged; restored");
        }
        Ok(restored)
    }

    /// At the start: every shim that a container may mount again is whole.
    pub(super) fn restore_shims(&self) {
        let records = self.records.lock();
        let mut names: Vec<String> =
            records.values().filter_map(|record| record.shim.clone()).collect();
        drop(records);
        names.sort();
        names.dedup();
        for name in names {
            if let Err(error) = self.restore_shim(&name) {
                error!(name, %error, "a shim that containers mount cannot be restored");
            }
        }
    }

    /// Removes installed shims that no container has needed for `grace`. Blocking.
    pub fn sweep_shims(&self, grace: Duration) {
        let dir = &self.paths.shim;
        let Some(current) = shim_install::name_of(&self.delivery) else { return };
        let records = self.records.lock().all();
        let mut since = self.unused.lock();
        let now = Instant::now();
        let installed = unused::installed(dir);
        for name in unused::decide(
            &installed,
            &current,
            records.values().map(AsRef::as_ref),
            &mut since,
            grace,
            now,
        ) {
            match unused::is_mounted(&name) {
                Ok(false) => {}
                // Not in the ledger, and yet somebody's.
                Ok(true) | Err(_) => {
                    since.forget(&name);
                    continue;
                }
            }
            match unused::remove(dir, &name) {
                Ok(()) => {
                    self.pages.forget_shim(&name);
                    self.board.forget(&name);
                    info!(name, "removed a shim that nobody needs any more");
                }
                Err(error) => {
                    since.forget(&name);
                    warn!(name, %error, "a shim that nobody needs cannot be removed");
                }
            }
        }
    }
}

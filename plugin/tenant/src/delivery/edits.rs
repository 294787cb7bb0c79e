//! What a container gets whatever the strategy: its pages, the shim, the driver's libraries.

use std::path::{Path, PathBuf};

use tessera_region::layout;

use super::DeliveryPlan;
use tessera_config::{Config, Mount};

/// The mounts, in an order that serves a runtime which does not sort them: the pages' directory first,
/// the writable file over it after. A container may have several shares, so each has a directory of its own,
/// named by its allocation; the runtime makes the one that they are in.
pub(super) fn mounts(plan: &DeliveryPlan<'_>, config: &Config) -> Vec<Mount> {
    let mount = |host: &Path, container: PathBuf, read_only| Mount {
        host: host.to_owned(),
        container,
        read_only,
    };
    let pages = Path::new(layout::CONTAINER_PAGES_DIR).join(plan.id.as_str());
    let mut mounts = vec![
        mount(plan.pages, pages.clone(), true),
        mount(&plan.pages.join(layout::USAGE_FILE), pages.join(layout::USAGE_FILE), false),
        mount(&plan.shim.shim, layout::CONTAINER_SHIM.into(), true),
    ];
    if config.container.inject_file() {
        mounts.push(mount(&plan.shim.preload, "/etc/ld.so.preload".into(), true));
    }
    mounts.extend(plan.parts.libraries.iter().cloned());
    mounts.extend(config.driver.mounts.iter().cloned());
    mounts
}

//! What a container gets whatever the strategy: its pages, the shim, the driver's libraries.

use std::path::{Path, PathBuf};

use tessera_region::layout;

use super::DeliveryPlan;
use tessera_config::{Config, Mount};

/// The mounts, in an order that serves a runtime which does not sort them: the pages' directory first,
/// the writable file over it after.
pub(super) fn mounts(parcel: &DeliveryPlan<'_>, config: &Config) -> Vec<Mount> {
    let mount = |host: &Path, container: PathBuf, read_only| Mount {
        host: host.to_owned(),
        container,
        read_only,
    };
    let pages = Path::new(layout::CONTAINER_PAGES_DIR);
    let mut mounts = vec![
        mount(parcel.pages, pages.to_owned(), true),
        mount(&parcel.pages.join(layout::USAGE_FILE), pages.join(layout::USAGE_FILE), false),
        mount(&parcel.shim.shim, layout::CONTAINER_SHIM.into(), true),
    ];
    if config.container.inject_file() {
        mounts.push(mount(&parcel.shim.preload, "/etc/ld.so.preload".into(), true));
    }
    mounts.extend(parcel.parts.libraries.iter().cloned());
    mounts.extend(config.driver.mounts.iter().cloned());
    mounts
}

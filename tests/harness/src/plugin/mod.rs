//! A node with GPUs that a test can break, a fake kubelet, the plugin, and tenants.

mod gpus;
mod node;
mod process;
mod tenant;

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tessera_view::change::Target;
use tessera_web::client::Client;

pub use crate::GIB;
use crate::PATIENCE;
pub use gpus::{FakeGpus, gpu, replica, uses};
pub use node::{HELD, Held, SETTINGS, TestNode, id_of, pod};
pub use process::{Simulated, stderr, tessera};
pub use tenant::{Tenant, connect, generation, limit, lose, tenant_process};

/// The resource of the tests.
pub const GPU: &str = "tessera.dev/gpu";

/// Fails the test if `future` hangs.
pub async fn bounded<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("it hangs")
}

/// Asks again and again until `look` finds something.
pub async fn until_async<T>(mut look: impl AsyncFnMut() -> Option<T>) -> T {
    bounded(async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

/// Looks again and again until `look` finds something.
pub async fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    bounded(async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// A client of the plugin whose files are below `dir`.
pub fn admin(dir: &Path) -> Client {
    Client::at(&dir.join("admin.sock"))
}

/// What a request is about: a pod or an allocation, by its name.
pub fn target(name: &str) -> Target {
    Target { name: name.into(), ..Target::default() }
}

/// Mounted until it is dropped.
#[derive(Debug)]
pub struct Mounted(PathBuf);

impl Mounted {
    /// A tmpfs at `dir`, which is made; `None`, with a word about it, where this process may not.
    pub fn tmpfs(dir: &Path, flags: MsFlags, options: &str) -> Option<Self> {
        std::fs::create_dir_all(dir).unwrap();
        if let Err(error) = mount(Some("test"), dir, Some("tmpfs"), flags, Some(options)) {
            eprintln!("not run: no file system can be mounted here ({error})");
            return None;
        }
        Some(Mounted(dir.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

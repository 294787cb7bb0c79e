//! Several resources from one plugin: each has a server, a socket and a registration of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{error, info};

use super::{DevicePlugin, Options, Report, Serving, SocketError, serve_with};

/// Plugins being served; see [`serve_all`].
#[derive(Debug)]
pub struct ResourceServers {
    status: RegistrationStatus,
    task: JoinHandle<()>,
}

impl ResourceServers {
    /// The registration of each resource. Clones may outlive this.
    pub fn status(&self) -> RegistrationStatus {
        self.status.clone()
    }

    pub async fn finished(self) {
        // The task can only be cancelled by the runtime's own end, and a panic has been reported.
        let _ = self.task.await;
    }
}

/// The registration of each resource that is served; cheap to clone.
#[derive(Clone, Debug)]
pub struct RegistrationStatus(watch::Receiver<BTreeMap<String, watch::Receiver<Report>>>);

impl RegistrationStatus {
    pub fn reports(&self) -> BTreeMap<String, Report> {
        let members = self.0.borrow();
        members.iter().map(|(name, report)| (name.clone(), report.borrow().clone())).collect()
    }
}

struct ResourceServer {
    // Dropping it stops the server too.
    stop: watch::Sender<bool>,
    serving: Serving,
}

impl ResourceServer {
    async fn end(self) {
        self.stop.send_replace(true);
        self.serving.finished().await;
    }
}

struct Servers<F> {
    dir: PathBuf,
    make: F,
    options: Options,
    members: BTreeMap<String, ResourceServer>,
    status: watch::Sender<BTreeMap<String, watch::Receiver<Report>>>,
}

/// Serves each of `resources` to the kubelet whose device plugin directory is `dir`, as
/// [`serve_with`] does, with the plugin that `make` gives for it, until `shutdown` is done. Follows
/// `resources` when they change.
///
/// Errors: [`SocketError`] if one of the first resources has no socket; its message says what to do. Later ones
/// are tried again.
pub fn serve_all<P, F>(
    resources: watch::Receiver<BTreeSet<String>>,
    dir: &Path,
    make: F,
    shutdown: impl Future<Output = ()> + Send + 'static,
    options: Options,
) -> Result<ResourceServers, SocketError>
where
    P: DevicePlugin,
    F: Fn(&str) -> Arc<P> + Send + 'static,
{
    let status = watch::Sender::new(BTreeMap::new());
    let readiness = RegistrationStatus(status.subscribe());
    let mut servers =
        Servers { dir: dir.to_owned(), make, options, members: BTreeMap::new(), status };
    let mut resources = resources;
    let first = resources.borrow_and_update().clone();
    for resource in &first {
        servers.join(resource)?;
    }
    servers.publish();
    let task = tokio::spawn(servers.run(resources, shutdown));
    Ok(ResourceServers { status: readiness, task })
}

impl<P: DevicePlugin, F: Fn(&str) -> Arc<P> + Send + 'static> Servers<F> {
    fn join(&mut self, resource: &str) -> Result<(), SocketError> {
        let (stop, mut stopped) = watch::channel(false);
        let until = async move {
            // An error means that the member has been dropped.
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        let plugin = (self.make)(resource);
        let serving = serve_with(resource, &self.dir, plugin, until, self.options.clone())?;
        self.members.insert(resource.to_owned(), ResourceServer { stop, serving });
        Ok(())
    }

    fn publish(&self) {
        let members = self.members.iter();
        let members = members.map(|(name, member)| (name.clone(), member.serving.report()));
        self.status.send_replace(members.collect());
    }

    async fn run(
        mut self,
        mut resources: watch::Receiver<BTreeSet<String>>,
        shutdown: impl Future<Output = ()> + Send,
    ) {
        let mut shutdown = std::pin::pin!(shutdown);
        let mut missing = false;
        loop {
            let again = async {
                match missing {
                    true => tokio::time::sleep(self.options.timing.max_backoff).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                () = &mut shutdown => break,
                () = again => {}
                changed = resources.changed() => if changed.is_err() {
                    // The set is final.
                    (&mut shutdown).await;
                    break;
                },
            }
            let wanted = resources.borrow_and_update().clone();
            missing = self.follow(&wanted).await;
        }
        let members = std::mem::take(&mut self.members);
        for member in members.values() {
            member.stop.send_replace(true);
        }
        for member in members.into_values() {
            member.end().await;
        }
    }

    /// Serves what is wanted and nothing else. True if something could not be served.
    async fn follow(&mut self, wanted: &BTreeSet<String>) -> bool {
        let mut missing = false;
        for resource in wanted {
            if self.members.contains_key(resource) {
                continue;
            }
            match self.join(resource) {
                Ok(()) => info!(resource, "serving one more resource"),
                Err(error) => {
                    error!(resource, %error, "a resource cannot be served");
                    missing = true;
                }
            }
        }
        let gone: Vec<String> =
            self.members.keys().filter(|name| !wanted.contains(*name)).cloned().collect();
        for resource in gone {
            if let Some(member) = self.members.remove(&resource) {
                member.end().await;
                info!(resource, "no longer serving a retired resource: nobody holds it");
            }
        }
        self.publish();
        missing
    }
}

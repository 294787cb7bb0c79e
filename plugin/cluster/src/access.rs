//! Where the API server is, and the credentials for it, as `kube` reads them from kubeconfigs.

use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::json;
use tessera_model::printable::causes;

use crate::error::{ApiError, Call, Failure};

/// Where Kubernetes puts a pod's credentials ("Accessing the Kubernetes API from a Pod").
pub(crate) const CREDENTIALS: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// A pod's API server and credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Host name or address.
    pub host: String,
    pub port: u16,
    /// The token, read again once a minute: kubelet renews it.
    pub token: PathBuf,
    /// The certificates that vouch for it; `None` speaks plain HTTP, to a proxy on this host.
    pub authority: Option<PathBuf>,
}

impl Server {
    /// As kubelet tells a pod; `None` outside of pods, and in those without a service account's token.
    pub fn of_pod() -> Option<Self> {
        let dir = Path::new(CREDENTIALS);
        let (token, authority) = (dir.join("token"), dir.join("ca.crt"));
        let host = std::env::var("KUBERNETES_SERVICE_HOST").ok()?;
        let port = std::env::var("KUBERNETES_SERVICE_PORT").ok()?.parse().ok()?;
        token.is_file().then_some(Server { host, port, token, authority: Some(authority) })
    }

    fn url(&self) -> String {
        let scheme = if self.authority.is_some() { "https" } else { "http" };
        // An IPv6 address has brackets in a URL.
        match self.host.contains(':') && !self.host.starts_with('[') {
            true => format!("{scheme}://[{}]:{}", self.host, self.port),
            false => format!("{scheme}://{}:{}", self.host, self.port),
        }
    }

    /// The same as a kubeconfig says it.
    fn kubeconfig(&self) -> Result<Kubeconfig, serde_json::Error> {
        let cluster = json!({ "server": self.url(), "certificate-authority": self.authority });
        serde_json::from_value(json!({
            "clusters": [{ "name": "pod", "cluster": cluster }],
            "users": [{ "name": "pod", "user": { "tokenFile": self.token } }],
            "contexts": [{ "name": "pod", "context": { "cluster": "pod", "user": "pod" } }],
            "current-context": "pod",
        }))
    }
}

/// How the API server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// With a pod's service account.
    Server(Server),
    /// With these kubeconfig files, merged as kubectl merges them, and a context of theirs, or else the current one.
    Kubeconfig(Vec<PathBuf>, Option<String>),
}

impl From<Server> for Access {
    fn from(server: Server) -> Self {
        Access::Server(server)
    }
}

impl Access {
    /// What the environment offers: a pod's service account, or else the files that `KUBECONFIG` names. `None`
    /// where there is neither.
    pub fn of_environment() -> Option<Self> {
        let kubeconfig = || Some(Access::Kubeconfig(of_variable()?, None));
        Server::of_pod().map(Access::Server).or_else(kubeconfig)
    }

    /// What kubectl would use: the file that was asked for, else those that `KUBECONFIG` names as far as they exist,
    /// else `~/.kube/config`, else a pod's service account.
    /// Errors: There is none of them.
    pub fn of_user(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Self, String> {
        let at_home = || {
            let file = std::env::home_dir()?.join(".kube/config");
            file.exists().then(|| vec![file])
        };
        let asked = kubeconfig.map(|file| vec![file.to_owned()]);
        if let Some(files) = asked.or_else(of_variable).or_else(at_home) {
            return Ok(Access::Kubeconfig(files, context.map(str::to_owned)));
        }
        let server = Server::of_pod().filter(|_| context.is_none());
        server.map(Access::Server).ok_or_else(|| {
            "no cluster to ask: there is no ~/.kube/config; name a file with --kubeconfig or KUBECONFIG".to_owned()
        })
    }

    /// What `kube` needs to connect. Reads files.
    pub(crate) async fn config(&self, call: &Call) -> Result<Config, ApiError> {
        let (said, context) = match self {
            Access::Server(server) => {
                (server.kubeconfig().map_err(|error| error.to_string()), None)
            }
            Access::Kubeconfig(files, context) => (merged(files), context.clone()),
        };
        let said = said.map_err(|why| self.wrong(call, &why))?;
        let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
        let config = Config::from_custom_kubeconfig(said, &options).await;
        let config = config.map_err(|error| self.wrong(call, &causes(&error)))?;
        let url = &config.cluster_url;
        // `kube` ends the process by a panic on others.
        let is_usable = matches!(url.scheme_str(), Some("http" | "https"));
        if !is_usable || url.host().is_none_or(str::is_empty) {
            let what = format!("server: {url} is not an address: write https://HOST:PORT");
            return Err(self.wrong(call, &what));
        }
        Ok(config)
    }

    /// What is wrong is wrong in the kubeconfig, where there is one.
    pub(crate) fn wrong(&self, call: &Call, what: &str) -> ApiError {
        match self {
            Access::Server(_) => call.failed(Failure::Unreachable, what),
            Access::Kubeconfig(files, _) => {
                call.failed(Failure::Kubeconfig, format!("{}: {what}", names(files)))
            }
        }
    }
}

/// The files that `KUBECONFIG` names, as far as they exist; all where none does.
fn of_variable() -> Option<Vec<PathBuf>> {
    let names = std::env::var_os("KUBECONFIG")?;
    let files = std::env::split_paths(&names).filter(|file| !file.as_os_str().is_empty());
    let (there, absent): (Vec<_>, Vec<_>) = files.partition(|file| file.exists());
    [there, absent].into_iter().find(|files| !files.is_empty())
}

/// The files, as `KUBECONFIG` names them.
pub(crate) fn names(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(":")
}

/// What the files say together, as kubectl merges them.
pub(crate) fn merged(files: &[PathBuf]) -> Result<Kubeconfig, String> {
    let read = |whole: Kubeconfig, file: &PathBuf| whole.merge(Kubeconfig::read_from(file)?);
    files.iter().try_fold(Kubeconfig::default(), read).map_err(|error| {
        // The reader of YAML shows the lines around the fault, in which tokens may stand.
        error.to_string().lines().next().unwrap_or_default().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_ipv6_has_brackets_in_a_url() {
        let url = |host: &str, authority: Option<&str>| {
            let (token, authority) = (PathBuf::new(), authority.map(PathBuf::from));
            Server { host: host.into(), port: 443, token, authority }.url()
        };
        assert_eq!(url("fd00::1", Some("ca")), "https://[fd00::1]:443");
        assert_eq!(url("[fd00::1]", Some("ca")), "https://[fd00::1]:443");
        assert_eq!(url("10.0.0.1", None), "http://10.0.0.1:443");
    }
}

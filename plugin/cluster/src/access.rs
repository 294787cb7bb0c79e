//! Where the API server is, and the credentials for it.

mod kubeconfig;
mod login;

use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::AuthInfo;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use tessera_system::files;

pub(crate) use kubeconfig::{in_use, merged, names};
pub(crate) use login::log_in;

use crate::error::{ApiError, Call};

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

/// Why there is nothing to connect with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoConnection {
    /// The kubeconfig is wrong: its file, and how.
    Kubeconfig(String),
    /// The credential plugin came to nothing.
    Login {
        command: String,
        /// What it did, where it is named, and what to do.
        reason: String,
    },
    /// Anything else, which may pass.
    Unreachable(String),
}

impl NoConnection {
    /// The error of a request that would have used it.
    pub fn of(self, call: &Call) -> ApiError {
        let call = call.clone();
        match self {
            NoConnection::Kubeconfig(reason) => ApiError::Kubeconfig { call, reason },
            NoConnection::Login { command, reason } => ApiError::Login { call, command, reason },
            NoConnection::Unreachable(reason) => ApiError::Unreachable { call, reason },
        }
    }
}

impl Access {
    /// What the environment offers: a pod's service account, or else the files that `KUBECONFIG` names. `None`
    /// where there is neither.
    pub fn of_environment() -> Option<Self> {
        let files = || {
            let names = std::env::var_os("KUBECONFIG")?;
            let files = std::env::split_paths(&names).filter(|path| !path.as_os_str().is_empty());
            let files: Vec<PathBuf> = files.collect();
            (!files.is_empty()).then_some(Access::Kubeconfig(files, None))
        };
        Server::of_pod().map(Access::Server).or_else(files)
    }

    /// What kubectl would use: the file that was asked for, else those that `KUBECONFIG` names as far as they exist,
    /// else `~/.kube/config`, else a pod's service account.
    ///
    /// # Errors
    /// There is none of them. The text says where was looked.
    pub fn of_user(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Self, String> {
        let with = |files| Access::Kubeconfig(files, context.map(str::to_owned));
        if let Some(file) = kubeconfig {
            if !file.exists() {
                let what = "there is no such file; correct --kubeconfig, or leave it out for KUBECONFIG or ~/.kube/config";
                return Err(format!("{}: {what}", file.display()));
            }
            return Ok(with(vec![file.to_owned()]));
        }
        let named = std::env::var_os("KUBECONFIG").filter(|names| !names.is_empty());
        if let Some(names) = named {
            let files = std::env::split_paths(&names).filter(|file| !file.as_os_str().is_empty());
            let (there, absent): (Vec<_>, Vec<_>) = files.partition(|file| file.exists());
            if there.is_empty() {
                let absent: Vec<String> =
                    absent.iter().map(|file| file.display().to_string()).collect();
                return Err(format!("KUBECONFIG names no file that exists: {}", absent.join(":")));
            }
            return Ok(with(there));
        }
        let home = std::env::home_dir().map(|home| home.join(".kube/config"));
        if let Some(file) = home.filter(|file| file.exists()) {
            return Ok(with(vec![file]));
        }
        match Server::of_pod() {
            Some(server) if context.is_none() => Ok(Access::Server(server)),
            _ => Err("no cluster to ask: there is no ~/.kube/config; name a file with --kubeconfig or KUBECONFIG"
                .to_owned()),
        }
    }

    /// What `kube` needs to connect. Blocking, on a thread of a runtime: reads files.
    ///
    /// # Errors
    /// The file that cannot be read, and why.
    pub(crate) fn config(&self) -> Result<Config, NoConnection> {
        match self {
            Access::Server(server) => of_server(server).map_err(NoConnection::Unreachable),
            Access::Kubeconfig(files, context) => {
                kubeconfig::read(files, context.as_deref()).map_err(NoConnection::Kubeconfig)
            }
        }
    }

    /// What is wrong is wrong in the kubeconfig, where there is one.
    pub(crate) fn wrong(&self, what: &str) -> NoConnection {
        match self {
            Access::Server(_) => NoConnection::Unreachable(what.to_owned()),
            Access::Kubeconfig(files, _) => {
                NoConnection::Kubeconfig(format!("{}: {what}", names(files)))
            }
        }
    }
}

fn of_server(server: &Server) -> Result<Config, String> {
    let url = server.url();
    let mut config = Config::new(url.parse().map_err(|error| format!("{url}: {error}"))?);
    if let Some(authority) = &server.authority {
        config.root_cert = Some(certificates(authority)?);
    }
    config.auth_info.token_file = Some(server.token.display().to_string());
    take_line_end(&mut config.auth_info)?;
    Ok(config)
}

/// `kube` takes no token's file with a line end, as `kubectl create token` writes it. Such a token is read again when the
/// API server does not take it any more.
fn take_line_end(login: &mut AuthInfo) -> Result<(), String> {
    if let (None, Some(file)) = (&login.token, &login.token_file) {
        let token = read(Path::new(file))?;
        if token.trim() != token {
            let mut written = json!(login);
            written["token"] = token.trim().into();
            *login = serde_json::from_value(written).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

fn certificates(file: &Path) -> Result<Vec<Vec<u8>>, String> {
    let pem = read(file)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let all = all.map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(useful(all.iter().map(|certificate| certificate.to_vec())))
}

/// The certificates that are of use; one that is not leaves the others.
fn useful(all: impl IntoIterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
    let mut store = RootCertStore::empty();
    let is_useful = |one: &Vec<u8>| store.add(CertificateDer::from(one.clone())).is_ok();
    all.into_iter().filter(is_useful).collect()
}

pub(crate) fn read(file: &Path) -> Result<String, String> {
    files::text(file, files::SMALL).map_err(|error| format!("{}: {error}", file.display()))
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

//! Where the API server is, and the credentials for it.

use std::path::{Path, PathBuf};

use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tessera_system::files;
use tokio::runtime::Handle;

/// Where Kubernetes puts a pod's credentials ("Accessing the Kubernetes API from a Pod").
pub(crate) const CREDENTIALS: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// A pod's API server and credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// The token, read again for each request: kubelet renews it.
    pub token: PathBuf,
    /// The certificates that vouch for it; `None` speaks plain HTTP, to a proxy on this host.
    pub authority: Option<PathBuf>,
}

impl Server {
    /// As kubelet tells a pod; `None` outside of pods, and in those without a service account's token.
    #[must_use]
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
    /// With the current context of these kubeconfig files, merged as kubectl merges them. A proxy that they name is
    /// not used.
    Kubeconfig(Vec<PathBuf>),
    /// As [`Access::Kubeconfig`], with a context that was asked for.
    Context(Vec<PathBuf>, String),
}

impl From<Server> for Access {
    fn from(server: Server) -> Self {
        Access::Server(server)
    }
}

impl Access {
    /// What the environment offers: a pod's service account, or else the files that `KUBECONFIG` names. `None`
    /// where there is neither.
    #[must_use]
    pub fn of_environment() -> Option<Self> {
        let files = || {
            let names = std::env::var_os("KUBECONFIG")?;
            let files = std::env::split_paths(&names).filter(|path| !path.as_os_str().is_empty());
            let files: Vec<PathBuf> = files.collect();
            (!files.is_empty()).then_some(Access::Kubeconfig(files))
        };
        Server::of_pod().map(Access::Server).or_else(files)
    }

    /// What kubectl would use: the file that was asked for, else those that `KUBECONFIG` names as far as they exist,
    /// else `~/.kube/config`, else a pod's service account.
    ///
    /// # Errors
    /// There is none of them. The text says where was looked.
    pub fn of_user(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Self, String> {
        let with = |files: Vec<PathBuf>| match context {
            Some(context) => Access::Context(files, context.to_owned()),
            None => Access::Kubeconfig(files),
        };
        if let Some(file) = kubeconfig {
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
    pub(crate) fn config(&self) -> Result<Config, String> {
        match self {
            Access::Server(server) => of_server(server),
            Access::Kubeconfig(files) => of_kubeconfig(files, None),
            Access::Context(files, context) => of_kubeconfig(files, Some(context.clone())),
        }
    }

    /// The token that goes with each request; `None` where `kube` sees to it. Blocking.
    ///
    /// # Errors
    /// The file that cannot be read, and why.
    pub(crate) fn token(&self) -> Result<Option<String>, String> {
        let Access::Server(server) = self else { return Ok(None) };
        read(&server.token).map(|token| Some(token.trim().to_owned()))
    }
}

fn of_server(server: &Server) -> Result<Config, String> {
    let url = server.url();
    let mut config = Config::new(url.parse().map_err(|error| format!("{url}: {error}"))?);
    if let Some(authority) = &server.authority {
        config.root_cert = Some(certificates(authority)?);
    }
    Ok(config)
}

/// Those that are of use; one that is not leaves the others.
fn certificates(file: &Path) -> Result<Vec<Vec<u8>>, String> {
    let pem = read(file)?;
    let mut useful = RootCertStore::empty();
    let mut certificates = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| format!("{}: {error}", file.display()))?;
        if useful.add(certificate.clone()).is_ok() {
            certificates.push(certificate.to_vec());
        }
    }
    Ok(certificates)
}

/// What the files say together, as kubectl merges them.
pub(crate) fn merged(files: &[PathBuf]) -> Result<Kubeconfig, String> {
    let mut whole = Kubeconfig::default();
    for file in files {
        // Refuses what is no file before another reader would wait for it.
        read(file)?;
        let at = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let one = Kubeconfig::read_from(file).map_err(|error| at(&error))?;
        whole = whole.merge(one).map_err(|error| at(&error))?;
    }
    Ok(whole)
}

fn of_kubeconfig(files: &[PathBuf], context: Option<String>) -> Result<Config, String> {
    let whole = merged(files)?;
    let names =
        || files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(":");
    let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
    let config = Handle::current().block_on(Config::from_custom_kubeconfig(whole, &options));
    config.map_err(|error| format!("{}: {error}", names()))
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

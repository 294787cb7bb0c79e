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
    /// With the current context of these kubeconfig files, merged as kubectl merges them.
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
    let mut whole = merged(files)?;
    let names =
        || files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(":");
    complete(&mut whole, context.as_deref()).map_err(|error| format!("{}: {error}", names()))?;
    let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
    let config = Handle::current().block_on(Config::from_custom_kubeconfig(whole, &options));
    let config = config.map_err(|error| format!("{}: {error}", names()))?;
    let url = &config.cluster_url;
    match (url.scheme_str(), url.host()) {
        // `kube` ends the process by a panic on others.
        (Some("http" | "https"), Some(host)) if !host.is_empty() => Ok(config),
        _ => Err(format!(
            "{}: {url} is no address of an API server: write https://HOST:PORT",
            names()
        )),
    }
}

/// Takes a server without a scheme as kubectl takes it: with TLS where something of TLS is set, else without.
///
/// # Errors
/// The context names a user that is not there: kubectl refuses that, and `kube` would go on as nobody.
fn complete(whole: &mut Kubeconfig, context: Option<&str>) -> Result<(), String> {
    let name = context.or(whole.current_context.as_deref()).unwrap_or_default();
    let named = whole.contexts.iter().find(|one| one.name == name);
    let Some(context) = named.and_then(|named| named.context.clone()) else { return Ok(()) };
    let user = context.user.as_deref().filter(|user| !user.is_empty());
    let known = user.and_then(|user| whole.auth_infos.iter().find(|one| one.name == user));
    if let (Some(user), None) = (user, known) {
        return Err(format!("context {name:?} names the user {user:?}, which is not there"));
    }
    let login = known.and_then(|one| one.auth_info.as_ref());
    let has_certificate = login.is_some_and(|login| {
        login.client_certificate.is_some() || login.client_certificate_data.is_some()
    });
    let cluster = whole.clusters.iter_mut().find(|one| one.name == context.cluster);
    let Some(cluster) = cluster.and_then(|one| one.cluster.as_mut()) else { return Ok(()) };
    let Some(server) = cluster.server.as_mut().filter(|server| !server.contains("://")) else {
        return Ok(());
    };
    let is_tls = has_certificate
        || cluster.certificate_authority.is_some()
        || cluster.certificate_authority_data.is_some()
        || cluster.insecure_skip_tls_verify == Some(true);
    server.insert_str(0, if is_tls { "https://" } else { "http://" });
    Ok(())
}

pub(crate) fn read(file: &Path) -> Result<String, String> {
    files::text(file, files::SMALL).map_err(|error| format!("{}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig_is_completed_as_kubectl_does_and_a_user_that_is_not_there_is_named() {
        let of = |server: &str, tls: &str, user: &str| {
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                 clusters: [{{name: k, cluster: {{server: '{server}'{tls}}}}}]\n\
                 users: [{{name: me, user: {{token: t}}}}]\n\
                 contexts: [{{name: c, context: {{cluster: k, user: {user}}}}}]\n"
            );
            let mut whole = Kubeconfig::from_yaml(&text).unwrap();
            complete(&mut whole, None)?;
            Ok::<_, String>(whole.clusters[0].cluster.clone().unwrap().server.unwrap())
        };
        let insecure = ", insecure-skip-tls-verify: true";
        assert_eq!(of("10.0.0.1:6443", "", "me").unwrap(), "http://10.0.0.1:6443");
        assert_eq!(of("10.0.0.1:6443", insecure, "me").unwrap(), "https://10.0.0.1:6443");
        assert_eq!(of("https://k:1", "", "me").unwrap(), "https://k:1");
        let error = of("https://k:1", "", "you").unwrap_err();
        assert!(error.contains("\"c\" names the user \"you\""), "{error}");
    }

    #[tokio::test]
    async fn a_server_that_is_no_url_is_an_error() {
        for server in ["10.0.0.1:6443", "a b", "", "http://", "://", "ftp://k", "k:port"] {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("config");
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                 clusters: [{{name: k, cluster: {{server: '{server}'}}}}]\n\
                 contexts: [{{name: c, context: {{cluster: k, user: ''}}}}]\n"
            );
            std::fs::write(&file, text).unwrap();
            let access = Access::Kubeconfig(vec![file]);
            let read = tokio::task::spawn_blocking(move || access.config());
            let config = read.await.unwrap();
            if let Ok(config) = config {
                let url = config.cluster_url;
                assert!(url.host().is_some() && url.scheme().is_some(), "{server}: {url}");
            }
        }
    }

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

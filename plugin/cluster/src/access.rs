//! Where the API server is, and the credentials for it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Config;
use kube::client::AuthError;
use kube::config::{
    AuthInfo, Context, ExecConfig, ExecInteractiveMode, KubeConfigOptions, Kubeconfig,
};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use serde_json::json;
use tessera_model::printable;
use tessera_system::child::ChildError;
use tessera_system::{child, files};
use tokio::runtime::Handle;

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
    /// Errors: There is none of them. The text says where was looked.
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
    pub(crate) fn config(&self, call: &Call) -> Result<Config, ApiError> {
        match self {
            Access::Server(server) => {
                of_server(server).map_err(|why| call.failed(Failure::Unreachable, why))
            }
            Access::Kubeconfig(files, context) => merged(files)
                .and_then(|whole| of_kubeconfig(whole, context.as_deref(), files))
                .map_err(|why| call.failed(Failure::Kubeconfig, why)),
        }
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

// === What kubeconfig files say ===

/// The files, as `KUBECONFIG` names them.
pub(crate) fn names(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(":")
}

/// What the files say together, as kubectl merges them.
pub(crate) fn merged(files: &[PathBuf]) -> Result<Kubeconfig, String> {
    let mut whole = Kubeconfig::default();
    for file in files {
        // The reader of YAML shows the lines around the fault, in which tokens may stand.
        let at = |error: &dyn std::fmt::Display| {
            let said = error.to_string();
            format!("{}: {}", file.display(), said.lines().next().unwrap_or_default())
        };
        let one = Kubeconfig::read_from(file).map_err(|error| at(&error))?;
        whole = whole.merge(one).map_err(|error| at(&error))?;
    }
    Ok(whole)
}

/// The context that was asked for, or else the current one.
pub(crate) fn in_use<'a>(
    whole: &'a Kubeconfig,
    asked: Option<&'a str>,
) -> Result<(&'a str, &'a Context), String> {
    let current = whole.current_context.as_deref().filter(|name| !name.is_empty());
    let Some(name) = asked.or(current) else {
        return Err(
            "current-context: the kubeconfig has no current context: name one with --context"
                .to_owned(),
        );
    };
    let named = whole.contexts.iter().find(|context| context.name == name);
    let Some(context) = named.and_then(|named| named.context.as_ref()) else {
        let names: Vec<&str> = whole.contexts.iter().map(|one| one.name.as_str()).collect();
        return Err(format!(
            "contexts: the kubeconfig has no context \"{name}\"; it has {}",
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        ));
    };
    Ok((name, context))
}

fn of_kubeconfig(
    whole: Kubeconfig,
    context: Option<&str>,
    files: &[PathBuf],
) -> Result<Config, String> {
    config(whole, context).map_err(|error| format!("{}: {error}", names(files)))
}

fn config(whole: Kubeconfig, context: Option<&str>) -> Result<Config, String> {
    let (name, used) = in_use(&whole, context)?;
    let user = used.user.clone().unwrap_or_default();
    // kubectl refuses that, and `kube` would go on as nobody.
    if !user.is_empty() && !whole.auth_infos.iter().any(|one| one.name == user) {
        return Err(format!(
            "context {name:?} names the user {user:?}, which is not there: correct the name, or add the user"
        ));
    }
    let asked = context.map(str::to_owned);
    let options = KubeConfigOptions { context: asked, ..KubeConfigOptions::default() };
    let config = Handle::current().block_on(Config::from_custom_kubeconfig(whole, &options));
    let mut config = config.map_err(|error| printable::causes(&error))?;
    let url = &config.cluster_url;
    // `kube` ends the process by a panic on others.
    if !matches!(url.scheme_str(), Some("http" | "https")) || url.host().is_none_or(str::is_empty) {
        return Err(format!("server: {url} is not an address: write https://HOST:PORT"));
    }
    config.root_cert = config.root_cert.map(useful);
    take_line_end(&mut config.auth_info).map_err(|why| format!("tokenFile: {why}"))?;
    Ok(config)
}

// === The credential plugin of a kubeconfig ===

/// Longest time for a login: a person may log in with a browser.
const WITH_A_PERSON: Duration = Duration::from_secs(300);
/// As [`WITH_A_PERSON`], where nobody can be asked.
const ALONE: Duration = Duration::from_secs(30);
/// Most of a plugin's words that is passed on, in bytes.
const LONGEST: usize = 400;

#[derive(Deserialize)]
struct ExecCredential {
    status: Status,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    expiration_timestamp: Option<Time>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

/// Puts what the credential plugin (Kubernetes, "Authenticating", "client-go credential plugins") gives in its place. It
/// is run here and not by `kube`, which waits for it without a limit, once for TLS and once for the token. Gives until when
/// that is good, where it says so. Blocking: runs a
/// command. Without a plugin, or beside a token or a password, which come first, nothing is changed.
pub(crate) fn log_in(
    access: &Access,
    login: &mut AuthInfo,
    call: &Call,
) -> Result<Option<SystemTime>, ApiError> {
    let has_password = login.username.is_some() && login.password.is_some();
    let has_token = login.token.is_some() || login.token_file.is_some();
    if has_password || has_token || login.auth_provider.is_some() {
        return Ok(None);
    }
    let Some(exec) = login.exec.take() else { return Ok(None) };
    let status = credential(access, &exec, None, call)?;
    // The one way to write a secret without another crate.
    let mut written = serde_json::to_value(&login).unwrap_or_default();
    let in_base64 = |text: String| json!(ByteString(text.into_bytes()));
    for (field, value) in [
        ("token", status.token.map(|token| json!(token))),
        ("client-certificate-data", status.client_certificate_data.map(in_base64)),
        ("client-key-data", status.client_key_data.map(in_base64)),
    ] {
        if let Some(value) = value {
            written[field] = value;
        }
    }
    *login = serde_json::from_value(written)
        .map_err(|error| access.wrong(call, &format!("exec: {error}")))?;
    Ok(status.expiration_timestamp.map(|at| at.0.into()))
}

/// What the credential plugin gives within `limit`, or else the usual one.
fn credential(
    access: &Access,
    exec: &ExecConfig,
    limit: Option<Duration>,
    call: &Call,
) -> Result<Status, ApiError> {
    let Some(name) = exec.command.as_deref().filter(|name| !name.is_empty()) else {
        return Err(access.wrong(call, &AuthError::MissingCommand.to_string()));
    };
    // The plugin runs, so the kubeconfig is right: a login may have to be done, or its server is away.
    let failed = |what: &str| {
        let message = format!("it {what}; run the command by itself to see why");
        call.failed(Failure::Login(name.to_owned()), message)
    };
    let terminal = child::has_terminal();
    let interactive = match &exec.interactive_mode {
        Some(ExecInteractiveMode::Never) => false,
        Some(ExecInteractiveMode::Always) if !terminal => {
            return Err(failed("has to ask a person, and there is no terminal"));
        }
        _ => terminal,
    };
    let usual = if interactive { WITH_A_PERSON } else { ALONE };
    let command = command(exec, name, interactive);
    let ended = child::run(command, interactive, limit.unwrap_or(usual));
    let ended = ended.map_err(|error| match error {
        ChildError::Start(error) => {
            let hint = match exec.install_hint.as_deref().unwrap_or_default().trim() {
                "" => ", or correct the path".to_owned(),
                hint => format!(": {hint}"),
            };
            access.wrong(
                call,
                &format!("the credential plugin {name:?} cannot run ({error}): install it{hint}"),
            )
        }
        error => failed(&error.to_string()),
    })?;
    if !ended.status.success() {
        let said = String::from_utf8_lossy(&ended.said);
        let said = said.trim().lines().next_back().unwrap_or_default();
        let said = printable::brief(said, LONGEST);
        let colon = if said.is_empty() { "" } else { ": " };
        return Err(failed(&format!("failed with {}{colon}{said}", ended.status)));
    }
    let read = serde_saphyr::from_slice::<ExecCredential>(&ended.out);
    // The reader shows the lines around the fault, in which a token may stand.
    let said = |error: String| error.lines().next().unwrap_or_default().to_owned();
    let no_credential =
        |why: &str| access.wrong(call, &format!("{name:?} prints no ExecCredential: {why}"));
    let status = read.map_err(|error| no_credential(&said(error.to_string())))?.status;
    match (&status.token, &status.client_certificate_data) {
        (None, None) => Err(no_credential("it has neither a token nor a certificate")),
        _ => Ok(status),
    }
}

fn command(exec: &ExecConfig, name: &str, interactive: bool) -> Command {
    let mut command = Command::new(name);
    command.args(exec.args.iter().flatten());
    let named = exec.env.iter().flatten();
    command.envs(named.filter_map(|env| env.get("name").zip(env.get("value"))));
    let cluster = exec.cluster.as_ref().filter(|_| exec.provide_cluster_info);
    let mut spec = json!({ "interactive": interactive });
    if let Some(cluster) = cluster {
        spec["cluster"] = json!(cluster);
    }
    let info = json!({ "apiVersion": exec.api_version, "kind": "ExecCredential", "spec": spec });
    command.env("KUBERNETES_EXEC_INFO", info.to_string());
    command
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

    fn of(script: &str, limit: Duration) -> Result<Status, ApiError> {
        let exec = json!({
            "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never",
            "command": "sh", "args": ["-c", script],
        });
        let access = Access::Kubeconfig(vec!["config".into()], None);
        let call = Call::new(crate::Verb::List, crate::Kind::PODS, "");
        credential(&access, &serde_json::from_value(exec).unwrap(), Some(limit), &call)
    }

    #[test]
    fn a_plugin_that_hangs_or_floods_is_ended_and_blamed() {
        let of = |script: &str, limit| {
            let error = of(script, Duration::from_secs(limit)).err().unwrap();
            assert_eq!(error.failure, Failure::Login("sh".to_owned()));
            error.message
        };
        let reason = of("sleep 4000 & wait", 1);
        assert!(reason.starts_with("it did not end within 1s"), "{reason}");
        let reason = of("yes", 3600);
        assert!(reason.starts_with("it printed more than 1048576 bytes"), "{reason}");
        let reason = of("echo one >&2; printf 'two\\033[2J\\n' >&2; exit 3", 3600);
        assert!(reason.starts_with("it failed with exit status: 3: two\u{1b}[2J;"), "{reason}");
    }

    #[test]
    fn what_a_plugin_gives_is_read_as_json_or_yaml_with_its_time() {
        let json = r#"{"kind":"ExecCredential","status":{"token":"t","expirationTimestamp":"2026-11-26T15:00:00Z"}}"#;
        let status =
            of(&format!("echo '{json}'; sleep 4000 &"), Duration::from_secs(3600)).unwrap();
        let until: SystemTime = status.expiration_timestamp.unwrap().0.into();
        assert_eq!(until, SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_705_200));
        let status = of("echo 'status: {token: t}'", Duration::from_secs(3600)).unwrap();
        assert_eq!(status.token.as_deref(), Some("t"));
        let none = of("echo 'status: {}'", Duration::from_secs(3600)).err().unwrap();
        assert_eq!(none.failure, Failure::Kubeconfig);
    }
}

//! What kubeconfig files say, and what is wrong with them: the file, the field, and what to do.

use std::path::{Path, PathBuf};

use http::HeaderValue;
use kube::Config;
use kube::client::AuthError;
use kube::config::{
    AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, KubeconfigError, LoadDataError,
};
use tokio::runtime::Handle;

use super::{NoConnection, useful};
use crate::client::chain;

/// Where the fields of a connection are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    files: String,
    cluster: String,
    user: String,
    /// What the kubeconfig says about installing its credential plugin.
    hint: String,
}

impl Origin {
    fn of_cluster(&self, field: &str, what: &str) -> NoConnection {
        let Origin { files, cluster, .. } = self;
        NoConnection::Kubeconfig(format!("{files}: cluster {cluster:?}: {field}: {what}"))
    }

    fn of_user(&self, field: &str, what: &str) -> NoConnection {
        let Origin { files, user, .. } = self;
        match files.as_str() {
            // A pod's own credentials are in no kubeconfig.
            "" => NoConnection::Unreachable(format!("{field}: {what}")),
            _ => NoConnection::Kubeconfig(format!("{files}: user {user:?}: {field}: {what}")),
        }
    }

    /// TLS cannot be set up. The authority's certificates are of use: see [`read`].
    pub fn no_identity(&self, error: &str) -> NoConnection {
        let what = format!(
            "they are no certificate and its key in PEM, or tls-server-name is no name ({error}): correct the field, or \
             log in again"
        );
        self.of_user("client-certificate, client-key", &what)
    }

    /// A credential plugin gave what no request can carry.
    pub fn no_word(&self) -> NoConnection {
        let what = "what the credential plugin gives is no token, which is one word: run the command to see";
        self.of_user("exec, auth-provider", what)
    }

    /// The credential plugin printed something else than a credential.
    pub fn no_credential(&self, error: &str) -> NoConnection {
        let what = format!("{error}: correct the command, or log in by another way");
        self.of_user("exec", &format!("the command prints no ExecCredential: {what}"))
    }

    /// The credential plugin cannot be started.
    pub fn no_plugin(&self, error: &str) -> NoConnection {
        let hint = match self.hint.trim() {
            "" => "install it, or correct the path".to_owned(),
            hint => format!("install it: {hint}"),
        };
        self.of_user("exec.command", &format!("the credential plugin cannot run ({error}): {hint}"))
    }

    /// The credential plugin runs, so the kubeconfig is right: a login may have to be done, or its server is away.
    pub fn no_login(&self, command: &str, what: &str) -> NoConnection {
        let Origin { files, user, .. } = self;
        NoConnection::Login {
            command: command.to_owned(),
            reason: format!(
                "it {what}; run the command by itself to see why ({files}: user {user:?})"
            ),
        }
    }

    /// Credentials that `kube` does not take.
    pub fn no_credentials(&self, error: &kube::Error) -> NoConnection {
        let said = chain(error);
        match error {
            kube::Error::Auth(AuthError::ReadTokenFile(..)) => {
                self.of_user("tokenFile", &format!("{said}: correct the path, or log in again"))
            }
            kube::Error::Auth(_) => {
                let what = format!("{said}: correct the field, or log in by another way");
                self.of_user("auth-provider", &what)
            }
            _ => self.of_user("token", &said),
        }
    }

    /// The names in `as` are no values of a header.
    pub fn no_impersonation(&self, error: &str) -> NoConnection {
        self.of_user("as", &format!("{error}: write a name in one line"))
    }
}

/// The files, as `KUBECONFIG` names them.
pub(crate) fn names(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(":")
}

/// What the files say together, as kubectl merges them.
pub(crate) fn merged(files: &[PathBuf]) -> Result<Kubeconfig, String> {
    let mut whole = Kubeconfig::default();
    for file in files {
        // Refuses what is no file before another reader would wait for it.
        super::read(file)?;
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
///
/// # Errors
/// There is none.
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

/// What `kube` needs to connect. Blocking, on a thread of a runtime: reads files.
///
/// # Errors
/// The first field that is wrong.
pub(super) fn read(
    files: &[PathBuf],
    context: Option<&str>,
) -> Result<(Config, Origin), NoConnection> {
    let mut whole = merged(files).map_err(NoConnection::Kubeconfig)?;
    let names = names(files);
    let wrong = |error: String| NoConnection::Kubeconfig(format!("{names}: {error}"));
    complete(&mut whole, context).map_err(wrong)?;
    let (_, used) = in_use(&whole, context).map_err(wrong)?;
    let user = used.user.clone().unwrap_or_default();
    let login = whole.auth_infos.iter().find(|one| one.name == user);
    let login = login.and_then(|one| one.auth_info.clone()).unwrap_or_default();
    let hint = login.exec.as_ref().and_then(|exec| exec.install_hint.clone()).unwrap_or_default();
    let origin = Origin { files: names.clone(), cluster: used.cluster.clone(), user, hint };
    let cluster = whole.clusters.iter().find(|one| one.name == origin.cluster);
    if let Some(cluster) = cluster.and_then(|one| one.cluster.as_ref()) {
        check_cluster(&origin, cluster)?;
    }
    let trimmed = check_login(&origin, &login)?;
    let named = whole.auth_infos.iter_mut().find(|one| one.name == origin.user);
    if let (Some(login), Some(named)) = (trimmed, named) {
        named.auth_info = Some(login);
    }
    let asked = context.map(str::to_owned);
    let options = KubeConfigOptions { context: asked, ..KubeConfigOptions::default() };
    let config = Handle::current().block_on(Config::from_custom_kubeconfig(whole, &options));
    let mut config = config.map_err(|error| unusable(&origin, &error))?;
    if let Some(all) = config.root_cert.take() {
        let all = useful(all);
        if all.is_empty() {
            let what = "it holds no certificate in PEM: put the cluster's certificates there";
            return Err(origin.of_cluster("certificate-authority(-data)", what));
        }
        config.root_cert = Some(all);
    }
    let url = &config.cluster_url;
    match (url.scheme_str(), url.host()) {
        // `kube` ends the process by a panic on others.
        (Some("http" | "https"), Some(host)) if !host.is_empty() => Ok((config, origin)),
        _ => {
            let what = format!("{url} is no address of an API server: write https://HOST:PORT");
            Err(origin.of_cluster("server", &what))
        }
    }
}

/// The field that `kube` cannot use.
fn unusable(origin: &Origin, error: &KubeconfigError) -> NoConnection {
    let said = chain(error);
    match error {
        KubeconfigError::LoadCertificateAuthority(LoadDataError::DecodeBase64(_)) => {
            let what =
                format!("it is no base64 ({said}): put the certificates in PEM there, in base64");
            origin.of_cluster("certificate-authority-data", &what)
        }
        KubeconfigError::LoadCertificateAuthority(_) | KubeconfigError::ParseCertificates(_) => {
            let what = format!("{said}: put the cluster's certificates in PEM there");
            origin.of_cluster("certificate-authority(-data)", &what)
        }
        KubeconfigError::MissingClusterUrl | KubeconfigError::ParseClusterUrl(_) => {
            origin.of_cluster("server", &format!("{said}: write https://HOST:PORT"))
        }
        KubeconfigError::ParseProxyUrl(_) => {
            let what = format!("{said}: correct it, or HTTPS_PROXY in the environment");
            origin.of_cluster("proxy-url", &what)
        }
        KubeconfigError::LoadClientCertificate(_) | KubeconfigError::LoadClientKey(_) => {
            origin.no_identity(&said)
        }
        _ => NoConnection::Kubeconfig(format!("{}: {said}", origin.files)),
    }
}

/// Files that cannot be read are named with their field. `kube` would wait for a pipe.
fn check_cluster(origin: &Origin, cluster: &Cluster) -> Result<(), NoConnection> {
    match (&cluster.certificate_authority, &cluster.certificate_authority_data) {
        (Some(file), None) => super::read(Path::new(file)).map(drop).map_err(|error| {
            let what = format!("{error}: correct the path, or allow it to be read");
            origin.of_cluster("certificate-authority", &what)
        }),
        _ => Ok(()),
    }
}

/// As [`check_cluster`]. `kube` ends the thread by a panic on a token that is not a word, and takes no file with a line
/// end, as `kubectl create token` writes it: then this gives a login with the file's token, which is read again when
/// the API server does not take it any more.
fn check_login(origin: &Origin, login: &AuthInfo) -> Result<Option<AuthInfo>, NoConnection> {
    let certificate = &login.client_certificate;
    for (field, file, has_data) in [
        ("client-certificate", certificate, login.client_certificate_data.is_some()),
        ("client-key", &login.client_key, login.client_key_data.is_some()),
    ] {
        if let (Some(file), false) = (file, has_data) {
            super::read(Path::new(file)).map_err(|error| {
                let what = format!("{error}: correct the path, or allow it to be read");
                origin.of_user(field, &what)
            })?;
        }
    }
    if login.auth_provider.as_ref().is_some_and(|provider| provider.config.contains_key("cmd-path"))
    {
        let what =
            "kubectl takes no command there since 1.26: use exec, with gke-gcloud-auth-plugin";
        return Err(origin.of_user("auth-provider.config.cmd-path", what));
    }
    // The one way to read the secret without another crate.
    let mut written = serde_json::to_value(login).unwrap_or_default();
    if written["token"].as_str().is_some_and(|token| !is_word(token)) {
        return Err(origin.of_user("token", "it is no token, which is one word: log in again"));
    }
    if let (None, Some(file)) = (&login.token, &login.token_file) {
        let token = super::read(Path::new(file)).map_err(|error| {
            let what = format!("{error}: correct the path, or log in again");
            origin.of_user("tokenFile", &what)
        })?;
        if !is_word(token.trim()) {
            let what = format!("{file} holds no token, which is one word: log in again");
            return Err(origin.of_user("tokenFile", &what));
        }
        if token.trim() != token {
            written["token"] = token.trim().into();
            return Ok(serde_json::from_value(written).ok());
        }
    }
    Ok(None)
}

/// Whether a request can carry it.
pub(super) fn is_word(token: &str) -> bool {
    HeaderValue::try_from(format!("Bearer {token}")).is_ok()
}

/// Takes a server without a scheme as kubectl takes it: with TLS where something of TLS is set, else without.
///
/// # Errors
/// The context names a cluster or a user that is not there: kubectl refuses that, and `kube` would go on as nobody.
fn complete(whole: &mut Kubeconfig, asked: Option<&str>) -> Result<(), String> {
    let (name, context) = in_use(whole, asked)?;
    let user = context.user.as_deref().filter(|user| !user.is_empty());
    let known = user.and_then(|user| whole.auth_infos.iter().find(|one| one.name == user));
    if let (Some(user), None) = (user, known) {
        return Err(format!(
            "context {name:?} names the user {user:?}, which is not there: correct the name, or add the user"
        ));
    }
    let login = known.and_then(|one| one.auth_info.as_ref());
    let has_certificate = login.is_some_and(|login| {
        login.client_certificate.is_some() || login.client_certificate_data.is_some()
    });
    let (name, cluster) = (name.to_owned(), context.cluster.clone());
    let known = whole.clusters.iter_mut().find(|one| one.name == cluster);
    let Some(cluster) = known.and_then(|one| one.cluster.as_mut()) else {
        return Err(format!(
            "context {name:?} names the cluster {cluster:?}, which is not there: correct the name, or add the cluster"
        ));
    };
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

#[cfg(test)]
mod tests {
    use super::super::Access;
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
            if let Ok((config, _)) = config {
                let url = config.cluster_url;
                assert!(url.host().is_some() && url.scheme().is_some(), "{server}: {url}");
            }
        }
    }
}

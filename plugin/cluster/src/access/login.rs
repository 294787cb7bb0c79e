//! The credential plugin of a kubeconfig (Kubernetes, "Authenticating", "client-go credential plugins"). It is run here
//! and not by `kube`, which waits for it without a limit, once for TLS and once for the token.

use std::process::Command;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::client::AuthError;
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode};
use serde::Deserialize;
use serde_json::json;
use tessera_model::printable;
use tessera_system::child::{self, ChildError};

use super::{Access, NoConnection};

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

/// Puts what the credential plugin gives in its place; until when that is good, where it says so. Blocking: runs a
/// command. Without a plugin, or beside a token or a password, which come first, nothing is changed.
///
/// # Errors
/// The plugin cannot run, fails, does not end within the limit, or gives no credential.
pub(crate) fn log_in(
    access: &Access,
    login: &mut AuthInfo,
) -> Result<Option<SystemTime>, NoConnection> {
    let has_password = login.username.is_some() && login.password.is_some();
    let has_token = login.token.is_some() || login.token_file.is_some();
    if has_password || has_token || login.auth_provider.is_some() {
        return Ok(None);
    }
    let Some(exec) = login.exec.take() else { return Ok(None) };
    let status = credential(access, &exec, None)?;
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
    *login =
        serde_json::from_value(written).map_err(|error| access.wrong(&format!("exec: {error}")))?;
    Ok(status.expiration_timestamp.map(|at| at.0.into()))
}

/// What the credential plugin gives within `limit`, or else the usual one.
fn credential(
    access: &Access,
    exec: &ExecConfig,
    limit: Option<Duration>,
) -> Result<Status, NoConnection> {
    let Some(name) = exec.command.as_deref().filter(|name| !name.is_empty()) else {
        return Err(access.wrong(&AuthError::MissingCommand.to_string()));
    };
    // The plugin runs, so the kubeconfig is right: a login may have to be done, or its server is away.
    let failed = |what: &str| NoConnection::Login {
        command: name.to_owned(),
        reason: format!("it {what}; run the command by itself to see why"),
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
            access.wrong(&format!(
                "the credential plugin {name:?} cannot run ({error}): install it{hint}"
            ))
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
        |why: &str| access.wrong(&format!("{name:?} prints no ExecCredential: {why}"));
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

    fn of(script: &str, limit: Duration) -> Result<Status, NoConnection> {
        let exec = json!({
            "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never",
            "command": "sh", "args": ["-c", script],
        });
        let access = Access::Kubeconfig(vec!["config".into()], None);
        credential(&access, &serde_json::from_value(exec).unwrap(), Some(limit))
    }

    #[test]
    fn a_plugin_that_hangs_or_floods_is_ended_and_blamed() {
        let of = |script: &str, limit| match of(script, Duration::from_secs(limit)) {
            Err(NoConnection::Login { command, reason }) => (command, reason),
            other => panic!("{:?}", other.map(|_| script)),
        };
        let (command, reason) = of("sleep 4000 & wait", 1);
        assert_eq!(command, "sh");
        assert!(reason.starts_with("it did not end within 1s"), "{reason}");
        let (_, reason) = of("yes", 3600);
        assert!(reason.starts_with("it printed more than 1048576 bytes"), "{reason}");
        let (_, reason) = of("echo one >&2; printf 'two\\033[2J\\n' >&2; exit 3", 3600);
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
        assert!(matches!(none, NoConnection::Kubeconfig(_)));
    }
}

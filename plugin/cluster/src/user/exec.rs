//! A command in a pod's container, as `kubectl exec` runs it without a terminal.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{Api, AttachParams};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::UserClient;
use crate::answer::refused;
use crate::client::chain;
use crate::error::{ApiError, Call, Kind, Verb};

/// Most that is read of what a command prints, of each stream.
const LARGEST: u64 = 4 << 20;

/// A command that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// Its exit status.
    pub code: i32,
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it printed as errors.
    pub stderr: Vec<u8>,
}

/// Why a command did not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
    /// The API server.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// It was not started, or the connection broke while it ran.
    #[error("{pod}: the command did not run to its end: {reason}")]
    Broken {
        /// The pod, as `namespace/name`.
        pod: String,
        reason: String,
    },
}

impl UserClient {
    /// Runs a command and waits for its end. No limit of time holds but the connection's own.
    ///
    /// # Errors
    /// See [`ExecError`]. A command that fails is none.
    pub async fn exec(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        command: &[String],
    ) -> Result<Finished, ExecError> {
        let call = Call::of(Verb::Create, Kind::PodExec, namespace, pod);
        let client = self.client.kube(&call).await?;
        let pods: Api<Pod> = Api::namespaced(client, namespace);
        let how = AttachParams::default().container(container).stdin(false);
        let broken =
            |reason: String| ExecError::Broken { pod: format!("{namespace}/{pod}"), reason };
        let begun = pods.exec(pod, command.iter().map(String::as_str), &how).await;
        let mut process = begun.map_err(|error| match error {
            kube::Error::Api(status) => ExecError::Api(refused(&call, *status, None)),
            error => broken(chain(&error)),
        })?;
        let (out, err) = (process.stdout(), process.stderr());
        let status = process.take_status();
        let ended = async {
            match status {
                Some(status) => status.await,
                None => None,
            }
        };
        let (stdout, stderr, status) = tokio::join!(all(out), all(err), ended);
        let Some(status) = status else {
            let reason = process.join().await.err().map(|error| chain(&error));
            return Err(broken(reason.unwrap_or_else(|| "the connection ended".to_owned())));
        };
        let code =
            code(&status).ok_or_else(|| broken(status.message.clone().unwrap_or_default()))?;
        Ok(Finished { code, stdout, stderr })
    }
}

async fn all(stream: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut text = Vec::new();
    if let Some(mut stream) = stream {
        // What has come is worth more than the reason why no more comes, which the status says.
        let _ = (&mut stream).take(LARGEST).read_to_end(&mut text).await;
        // The rest is read, or the command would wait for ever.
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
    text
}

/// The exit status; `None` where the command was not run.
fn code(status: &Status) -> Option<i32> {
    if status.status.as_deref() == Some("Success") {
        return Some(0);
    }
    let causes = status.details.as_ref()?.causes.as_ref()?;
    let cause = causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"))?;
    cause.message.as_ref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_commands_exit_status_is_in_the_causes() {
        let status = |value| serde_json::from_value::<Status>(value).unwrap();
        assert_eq!(code(&status(json!({ "status": "Success" }))), Some(0));
        let failed = json!({
            "status": "Failure", "reason": "NonZeroExitCode", "message": "command terminated",
            "details": { "causes": [{ "reason": "ExitCode", "message": "64" }] },
        });
        assert_eq!(code(&status(failed)), Some(64));
        assert_eq!(code(&status(json!({ "status": "Failure", "message": "no such file" }))), None);
    }
}

//! Where answers come from: the plugin of this node, asked over root's socket, or those of a cluster's nodes, asked through
//! the API server. And why there is none: a sentence, and the exit status that it is.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tessera_api::admin::reach::{TIMEOUT, client, get};
use tessera_api::admin::{EXIT_FORBIDDEN, EXIT_UNAVAILABLE, EXIT_USAGE, ask};
use tessera_config::Config;
use tessera_fleet::merge::{Answered, answered};
use tessera_fleet::{AskError, Fleet, Question, Why};
use tessera_model::printable;
use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::change::Call;
use tessera_view::explain::Explanation;
use tessera_view::history::{Answer, Query};
use tessera_view::status::Status;
use tessera_view::trace::Trace;
use tessera_view::{API_VERSION, fleet};
use tessera_web::client::ClientError;

use crate::kubectl::Common;

/// How long answers from the history may take, and a trace beyond its own length.
const LONG: Duration = Duration::from_secs(20);

/// A failure, in words that say what to do.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Failure {
    pub text: String,
    pub status: u8,
}

impl Failure {
    /// The request failed, or nothing is called so.
    pub fn failed(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: 1 }
    }

    /// The command line or the kubeconfig is wrong.
    pub fn usage(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: EXIT_USAGE }
    }

    /// The process's status; the failure is said on standard error.
    pub fn exit(self, program: &str) -> ExitCode {
        eprintln!("{program}: {}", printable::line(&self.text));
        ExitCode::from(self.status)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::failed(error.to_string())
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Failure::failed(error.to_string())
    }
}

impl From<AskError> for Failure {
    fn from(AskError { why, text }: AskError) -> Self {
        let status = match why {
            Why::Silent | Why::Unauthenticated | Why::NoPlugin => EXIT_UNAVAILABLE,
            Why::Forbidden | Why::NoRights => EXIT_FORBIDDEN,
            Why::Invalid | Why::Kubeconfig => EXIT_USAGE,
            Why::Unknown => 1,
        };
        Failure { text, status }
    }
}

/// See the module's text.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// The plugin of this node.
    Node(Arc<Config>),
    /// Those of a cluster's nodes.
    Cluster(Fleet, Common),
}

impl Source {
    pub fn node(config: Config) -> Self {
        Source::Node(Arc::new(config))
    }

    /// The namespace whose pods are meant; empty for all.
    pub fn namespace(&self, given: Option<&str>) -> String {
        match self {
            Source::Node(_) => given.unwrap_or_default().to_owned(),
            Source::Cluster(fleet, common) => common.namespace(fleet),
        }
    }

    /// Everything at this moment; a node is a fleet of one.
    pub async fn fleet(&self) -> Result<fleet::Fleet, Failure> {
        match self {
            Source::Node(config) => of_node(config, &Question::fleet(), TIMEOUT).await,
            Source::Cluster(fleet, _) => Ok(fleet.gather().await?),
        }
    }

    /// How a command ends that shows what these nodes said: by the reason where none said anything.
    pub fn exit(&self, fleet: &fleet::Fleet) -> ExitCode {
        let refusal = match self {
            Source::Cluster(cluster, _) => cluster.refusal().map(|why| Failure::from(why).status),
            Source::Node(_) => None,
        };
        match fleet.nodes.iter().any(|entry| entry.answers) {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(refusal.unwrap_or(EXIT_UNAVAILABLE)),
        }
    }

    pub async fn histories(&self, asked: &Query) -> Result<Answered<Answer>, Failure> {
        match self {
            Source::Node(config) => own(of_node(config, &Question::history(asked), LONG).await),
            Source::Cluster(fleet, common) => {
                Ok(answered(fleet.histories(common.one_node()?, asked).await?)?)
            }
        }
    }

    /// A bare name is a pod's of the namespace, or an allocation's id.
    pub async fn explanations(
        &self,
        asked: &str,
        namespace: &str,
    ) -> Result<Answered<Explanation>, Failure> {
        let subject = subject(asked, namespace);
        match self {
            Source::Node(config) => {
                own(of_node(config, &Question::explain(&subject, ""), TIMEOUT).await)
            }
            Source::Cluster(fleet, common) => {
                let node = common.one_node()?;
                let mut answers = fleet.explanations(node, &subject).await?;
                if subject != asked && answers.iter().all(|(_, answer)| answer.is_err()) {
                    let others = fleet.explanations(node, asked).await?;
                    if others.iter().any(|(_, answer)| answer.is_ok()) {
                        answers = others;
                    }
                }
                Ok(answered(answers)?)
            }
        }
    }

    pub async fn recommendations(&self, scope: &Scope) -> Result<Recommendations, Failure> {
        match self {
            Source::Node(config) => {
                of_node(config, &Question::of_scope("recommend", scope), LONG).await
            }
            Source::Cluster(fleet, _) => Ok(fleet.recommendations(scope).await?),
        }
    }

    pub async fn waste(&self, scope: &Scope) -> Result<Waste, Failure> {
        match self {
            Source::Node(config) => {
                of_node(config, &Question::of_scope("waste", scope), LONG).await
            }
            Source::Cluster(fleet, _) => Ok(fleet.waste(scope).await?),
        }
    }

    pub async fn traces(&self, seconds: u32) -> Result<Answered<Trace>, Failure> {
        match self {
            Source::Node(config) => {
                let limit = LONG + Duration::from_secs(seconds.into());
                // Not again where it breaks off: it takes its time.
                let asked = Question::trace("", seconds).target();
                let trace = client(&config.paths.admin, limit).get(&asked).await;
                own(trace.map_err(|error| failed(&error)))
            }
            Source::Cluster(fleet, common) => {
                let namespace = common.namespace.as_deref().unwrap_or_default();
                let traces = fleet.traces(common.one_node()?, namespace, seconds).await?;
                Ok(answered(traces)?)
            }
        }
    }
}

/// A node's own answer has no name before it.
fn own<T>(answer: Result<T, Failure>) -> Result<Answered<T>, Failure> {
    Ok((vec![(String::new(), answer?)], Vec::new()))
}

async fn of_node<T: DeserializeOwned>(
    config: &Config,
    question: &Question,
    limit: Duration,
) -> Result<T, Failure> {
    let answer = get(&config.paths.admin, &question.target(), limit).await;
    answer.map_err(|error| failed(&error))
}

/// The whole status of this node, as root alone has it.
pub(crate) async fn status(config: &Config) -> Result<Status, Failure> {
    ask(&config.paths.admin).await.map_err(|error| failed(&error))
}

/// Asks the plugin of this node for a change.
pub(crate) async fn change<C: Call>(config: &Config, request: &C) -> Result<C::Answer, Failure> {
    client(&config.paths.admin, TIMEOUT).call(request).await.map_err(|error| {
        let Failure { mut text, status } = failed(&error);
        if matches!(error, ClientError::Late { .. }) {
            text.push_str("; what was asked may still be done");
        }
        // A refusal is an answer.
        Failure { text, status: if error.is_silence() { status } else { 1 } }
    })
}

/// Why this node's plugin gave no answer.
pub(crate) fn failed(error: &ClientError) -> Failure {
    Failure { text: printable::line(&error.to_string()).into_owned(), status: error.exit() }
}

/// A subject in full: a bare name is a pod's in the namespace, where it is no GPU's.
pub(crate) fn subject(asked: &str, namespace: &str) -> String {
    let is_gpu = asked.starts_with("GPU-") || asked.starts_with("MIG-");
    match asked.contains('/') || asked.is_empty() || is_gpu || namespace.is_empty() {
        true => asked.to_owned(),
        false => format!("{namespace}/{asked}"),
    }
}

/// What nodes say, for programs: a node's own answer as it is, others with their nodes under this name.
pub(crate) fn by_node<T: serde::Serialize>(
    source: &Source,
    (answers, silent): &Answered<T>,
    entry: impl Fn(&str, &T) -> serde_json::Value,
) -> Result<serde_json::Value, Failure> {
    Ok(match (source, answers.as_slice()) {
        (Source::Node(_), [(_, own)]) => serde_json::to_value(own)?,
        _ => {
            let nodes: Vec<_> = answers.iter().map(|(node, one)| entry(node, one)).collect();
            serde_json::json!({ "api_version": API_VERSION, "nodes": nodes, "remarks": silent })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_no_silence() {
        for (why, status) in [
            (Why::Forbidden, 77),
            (Why::NoRights, 77),
            (Why::Kubeconfig, 64),
            (Why::Silent, 69),
            // As where the API server says so of the list of pods.
            (Why::Unauthenticated, 69),
            (Why::Unknown, 1),
        ] {
            assert_eq!(Failure::from(why.says("no".into())).status, status, "{why:?}");
        }
    }

    #[test]
    fn a_bare_name_is_a_pods_of_the_namespace() {
        assert_eq!(subject("chat", "team"), "team/chat");
        assert_eq!(subject("other/chat", "team"), "other/chat");
        assert_eq!(subject("GPU-1234", "team"), "GPU-1234");
        assert_eq!((subject("chat", ""), subject("", "team")), ("chat".into(), String::new()));
    }
}

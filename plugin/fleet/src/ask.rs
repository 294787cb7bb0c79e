//! One question to one node, and one question to many.

use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tessera_cluster::user::{Proxied, UserClient};
use tessera_view::history;
use tessera_web::client;
use tessera_web::source::Scope;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::answer::{self, AskError, Why};
use crate::places::Place;

/// Most of an answer that is read: a month of 64 tenants has some MiB.
const LARGEST: usize = 8 << 20;
/// Most of a node as it is now, which is kept: 16 GPUs with 64 tenants each have less than 1 MiB.
pub(crate) const LARGEST_VIEW: usize = 2 << 20;
/// The port of the plugin's JSON API where its pod names none.
const PORT: u16 = 9481;

/// A question of the JSON API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// The path below `/api/v1/`.
    path: &'static str,
    /// Its parameters; those that are empty or 0 are left out.
    query: Vec<(&'static str, String)>,
}

impl Question {
    /// Everything at this moment.
    pub fn fleet() -> Self {
        Question { path: "fleet", query: Vec::new() }
    }

    /// What was.
    pub fn history(asked: &history::Query) -> Self {
        Question { path: "history", query: Vec::new() }
            .with("subject", &asked.subject)
            .with("namespace", &asked.namespace)
            .number("since_unix_ms", asked.since_unix_ms)
            .number("until_unix_ms", asked.until_unix_ms)
            .number("step_seconds", asked.step_seconds)
    }

    /// Why a subject is as it is, for a reader of this namespace, or of all where it is empty.
    pub fn explain(subject: &str, namespace: &str) -> Self {
        Question { path: "explain", query: Vec::new() }
            .with("subject", subject)
            .with("namespace", namespace)
    }

    /// `recommend` or `waste`.
    pub fn of_scope(path: &'static str, scope: &Scope) -> Self {
        Question { path, query: Vec::new() }
            .with("namespace", &scope.namespace)
            .with("pod", &scope.pod)
            .number("since_unix_ms", scope.since_unix_ms)
    }

    /// What the arbiter does for so many seconds, of tenants of this namespace, or of all where it is empty.
    pub fn trace(namespace: &str, seconds: u32) -> Self {
        Question { path: "trace", query: Vec::new() }
            .with("namespace", namespace)
            .number("seconds", seconds)
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        if !value.is_empty() {
            self.query.push((name, value.to_owned()));
        }
        self
    }

    fn number(self, name: &'static str, value: impl Into<i64>) -> Self {
        match value.into() {
            0 => self,
            value => self.with(name, &value.to_string()),
        }
    }

    fn largest(&self) -> usize {
        if self.path == "fleet" { LARGEST_VIEW } else { LARGEST }
    }

    /// What is asked for.
    pub fn target(&self) -> String {
        let query: Vec<(&str, &str)> =
            self.query.iter().map(|(name, value)| (*name, value.as_str())).collect();
        format!("/api/v1/{}{}", self.path, client::query(&query))
    }
}

/// How nodes are asked.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    pub user: UserClient,
    pub port: Option<u16>,
    pub viewer: String,
    /// The namespace whose reader the user is, where that is not a reader of all.
    pub namespace: String,
    /// For one question to one node.
    pub limit: Duration,
    /// Questions at a time.
    pub parallel: Arc<Semaphore>,
}

impl Asker {
    /// The body of a successful answer. A reader without rights on the whole is one of a namespace.
    pub async fn text(
        &self,
        place: &Place,
        question: &Question,
        accept: &'static str,
    ) -> Result<Vec<u8>, AskError> {
        let answer = self.once(place, question, accept).await;
        let is_narrow = question.query.iter().any(|(name, _)| *name == "namespace");
        match answer {
            Err(AskError { why: Why::NoRights, .. })
                if !is_narrow && !self.namespace.is_empty() =>
            {
                let question = question.clone().with("namespace", &self.namespace);
                self.once(place, &question, accept).await
            }
            answer => answer,
        }
    }

    async fn once(
        &self,
        place: &Place,
        question: &Question,
        accept: &'static str,
    ) -> Result<Vec<u8>, AskError> {
        if !place.away.is_empty() {
            return Err(Why::Silent.says(place.away.clone()));
        }
        // Never closed.
        let _permit = self.parallel.acquire().await;
        let port = self.port.or(Some(place.port).filter(|port| *port != 0)).unwrap_or(PORT);
        let proxied = Proxied {
            namespace: place.namespace.clone(),
            pod: place.pod.clone(),
            port,
            target: question.target(),
            accept,
        };
        let passed =
            self.user.through_pod(&proxied, &self.viewer, self.limit, question.largest()).await;
        let viewer = format!("{}/{}", place.namespace, self.viewer);
        let passed = passed.map_err(|error| answer::failed(error, &viewer))?;
        answer::body(place, port, &passed)
    }

    /// An answer in JSON.
    pub async fn json<T: DeserializeOwned>(
        &self,
        place: &Place,
        question: &Question,
    ) -> Result<T, AskError> {
        answer::read(&self.text(place, question, "application/json").await?)
    }

    /// The answers of all of these nodes, in their order. `question` is what each is asked.
    pub async fn all<T: DeserializeOwned + Send + 'static>(
        &self,
        places: &[Place],
        question: impl Fn(&Place) -> Question,
    ) -> Vec<(String, Result<T, AskError>)> {
        let mut tasks = JoinSet::new();
        for (at, place) in places.iter().enumerate() {
            let (asker, place, question) = (self.clone(), place.clone(), question(place));
            tasks.spawn(async move { (at, asker.json(&place, &question).await) });
        }
        let lost = || Why::Silent.says("its answer could not be read".to_owned());
        let mut answers: Vec<(String, Result<T, AskError>)> =
            places.iter().map(|place| (place.node.clone(), Err(lost()))).collect();
        while let Some(done) = tasks.join_next().await {
            if let Ok((at, answer)) = done {
                answers[at].1 = answer;
            }
        }
        answers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_become_paths() {
        let scope = Scope { namespace: "a b".into(), pod: "team/chat-0".into(), since_unix_ms: 5 };
        let path = "/api/v1/recommend?namespace=a+b&pod=team%2Fchat-0&since_unix_ms=5";
        assert_eq!(Question::of_scope("recommend", &scope).target(), path);
        assert_eq!(Question::of_scope("waste", &Scope::default()).target(), "/api/v1/waste");
        let asked = history::Query {
            subject: "team/a b".into(),
            since_unix_ms: 5,
            step_seconds: 10,
            ..history::Query::default()
        };
        let path = "/api/v1/history?subject=team%2Fa+b&since_unix_ms=5&step_seconds=10";
        assert_eq!(Question::history(&asked).target(), path);
        assert_eq!(Question::explain("0", "").target(), "/api/v1/explain?subject=0", "a GPU");
    }
}

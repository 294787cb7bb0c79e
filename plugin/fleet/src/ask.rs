//! One question to one node, and one question to many.

use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tessera_cluster::user::{Proxied, UserClient, escaped};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::answer::{self, AskError};
use crate::places::Place;

/// Most of an answer that is read: a month of 64 tenants has some MiB.
const LARGEST: usize = 8 << 20;
/// Most of a node as it is now, which is kept: 16 GPUs with 64 tenants each have less than 1 MiB.
pub(crate) const LARGEST_VIEW: usize = 2 << 20;
/// The port of the plugin's JSON API where its pod names none.
const PORT: u16 = 9481;

/// A question of the JSON API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Question {
    /// The path below `/api/v1/`.
    pub path: &'static str,
    /// Its parameters; those without a value are left out.
    pub query: Vec<(&'static str, String)>,
}

impl Question {
    pub fn new(path: &'static str) -> Self {
        Question { path, query: Vec::new() }
    }

    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        let value = value.to_string();
        if !value.is_empty() && value != "0" {
            self.query.push((name, value));
        }
        self
    }

    fn largest(&self) -> usize {
        if self.path == "fleet" { LARGEST_VIEW } else { LARGEST }
    }

    fn target(&self) -> String {
        let query = self.query.iter().map(|(name, value)| format!("{name}={}", escaped(value)));
        let query = query.collect::<Vec<_>>().join("&");
        let mark = if query.is_empty() { "" } else { "?" };
        format!("/api/v1/{}{mark}{query}", self.path)
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
            Err(AskError::NoRights(_)) if !is_narrow && !self.namespace.is_empty() => {
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
            return Err(AskError::Silent(place.away.clone()));
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
        let passed = passed.map_err(|error| answer::failed(&error, &viewer))?;
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
        let lost = || AskError::Silent("its answer could not be read".to_owned());
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

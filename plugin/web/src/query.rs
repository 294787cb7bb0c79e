//! The parameters of a request.

use std::collections::BTreeSet;

use axum::http::{StatusCode, Uri};
use serde::Deserialize;
use tessera_view::advice::Scope;
use tessera_view::{history, trace};

use crate::authorise::is_name;
use crate::source::Refusal;

/// Longest name.
const LONGEST: usize = 1024;

/// The namespace of `NAMESPACE/NAME`.
pub(crate) fn namespace_of(subject: &str) -> Option<&str> {
    let (namespace, _) = subject.split_once('/')?;
    is_name(namespace).then_some(namespace)
}

/// Every route takes these; what one does not need is ignored there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Parameters {
    /// Only what is of this namespace.
    pub namespace: String,
    /// Only what is of this node.
    pub node: String,
    /// What is asked about.
    pub subject: String,
    /// Only this pod.
    pub pod: String,
    /// The earliest instant.
    pub since_unix_ms: i64,
    /// The latest.
    pub until_unix_ms: i64,
    /// Length of a bucket.
    pub step_seconds: u32,
    /// Length of a trace.
    pub seconds: Option<u32>,
}

impl Parameters {
    pub fn of(uri: &Uri) -> Result<Self, Refusal> {
        let query = uri.query().unwrap_or_default();
        let bad = |text: String| Refusal::new(StatusCode::BAD_REQUEST, text);
        let found: Self = serde_urlencoded::from_str(query)
            .map_err(|error| bad(format!("the query cannot be read: {error}")))?;
        for (name, value) in [
            ("namespace", &found.namespace),
            ("node", &found.node),
            ("subject", &found.subject),
            ("pod", &found.pod),
        ] {
            if value.len() > LONGEST {
                return Err(bad(format!("{name} is longer than {LONGEST} bytes")));
            }
        }
        Ok(found)
    }

    /// The namespaces that the question names: by itself, or before the name of a pod or a claim.
    pub fn namespaces(&self) -> BTreeSet<String> {
        let own = (!self.namespace.is_empty()).then_some(self.namespace.as_str());
        let all = [own, namespace_of(&self.subject), namespace_of(&self.pod)];
        all.into_iter().flatten().map(str::to_owned).collect()
    }

    /// What is asked of a history.
    ///
    /// # Errors
    /// It makes no sense. This is said before a source is asked, whose refusals are for readers of everything.
    pub fn history(&self) -> Result<history::Query, Refusal> {
        let bad = |text: String| Err(Refusal::new(StatusCode::BAD_REQUEST, text));
        if ![0, 10, 300, 3600].contains(&self.step_seconds) {
            return bad(format!(
                "there are no buckets of {} s: ask for 10, 300 or 3600, or leave it out",
                self.step_seconds
            ));
        }
        if self.until_unix_ms != 0 && self.since_unix_ms > self.until_unix_ms {
            return bad("the window ends before it begins: since is later than until".to_owned());
        }
        Ok(history::Query {
            subject: self.subject.clone(),
            namespace: self.namespace.clone(),
            since_unix_ms: self.since_unix_ms,
            until_unix_ms: self.until_unix_ms,
            step_seconds: self.step_seconds,
        })
    }

    /// How long to trace, seconds.
    pub fn seconds(&self) -> Result<u32, Refusal> {
        let seconds = self.seconds.unwrap_or(trace::USUAL);
        match (1..=trace::LONGEST).contains(&seconds) {
            true => Ok(seconds),
            false => {
                let text = format!("a trace takes 1 to {} seconds, not {seconds}", trace::LONGEST);
                Err(Refusal::new(StatusCode::BAD_REQUEST, text))
            }
        }
    }

    pub fn scope(&self) -> Scope {
        Scope {
            namespace: self.namespace.clone(),
            pod: self.pod.clone(),
            since_unix_ms: self.since_unix_ms,
        }
    }
}

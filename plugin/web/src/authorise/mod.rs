//! Which tenants a caller may see: as the API server says of the token's user, who may read the pods of all
//! namespaces, or of some.
//!
//! The API server is asked for as little as kubelet asks it for its own endpoints, and what it answers is kept as
//! long. Without its answer nobody sees anything. Neither a token nor a part of one is logged or kept: what is kept
//! is found by its SHA-256.
//!
//! Namespaces that a question names are asked about apart from those that have tenants here: whether an answer is at hand
//! says which the reader has named, and nothing of what is there.

mod cache;
mod token;

use std::collections::BTreeSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use futures_util::future::join_all;
use sha2::{Digest, Sha256};
use tessera_cluster::Verb;
use tessera_cluster::reviews::{ReviewClient, User};
use tessera_view::narrow::Rights;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::counts::{Counts, Review};
use crate::problem::Refusal;
use cache::Cache;
pub use token::TESSERA_AUTHORIZATION;

/// For how long answers are kept, and waited for.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// A token's user.
    pub token: Duration,
    /// That the API server does not know a token: it may be accepted a moment later.
    pub unknown: Duration,
    /// That something is allowed.
    pub allowed: Duration,
    /// That something is denied.
    pub denied: Duration,
    /// Longest wait for the API server, over all questions of one request.
    pub limit: Duration,
}

impl Default for Times {
    /// Kubelet's (`authentication.webhook.cacheTTL`, `authorization.webhook.cacheAuthorizedTTL` and
    /// `cacheUnauthorizedTTL`).
    fn default() -> Self {
        Times {
            token: Duration::from_secs(120),
            unknown: Duration::from_secs(10),
            allowed: Duration::from_secs(300),
            denied: Duration::from_secs(30),
            limit: Duration::from_secs(10),
        }
    }
}

/// Callers and answers that are kept.
const TOKENS: usize = 512;
const ANSWERS: usize = 8192;
/// Questions that the API server is asked at a time: for users of tokens, and for their rights.
const TOKEN_REVIEWS: usize = 4;
const ACCESS_REVIEWS: usize = 8;
/// Namespaces of one answer that are asked for. The tenants of further ones count among the others.
const NAMESPACES: usize = 4096;
type Hash = [u8; 32];

/// The readers' rights.
#[derive(Clone)]
pub enum Authorisation {
    /// Everybody that can connect may see everything. Only for sockets that nobody else can connect to.
    None,
    /// As the API server says.
    Kubernetes(Arc<Authoriser>),
}

impl fmt::Debug for Authorisation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Authorisation::None => "None",
            Authorisation::Kubernetes(_) => "Kubernetes",
        })
    }
}

impl Authorisation {
    /// Asks an API server, and counts that.
    pub fn kubernetes(reviews: ReviewClient, counts: Arc<Counts>) -> Self {
        Self::kubernetes_for(reviews, counts, Times::default())
    }

    /// As [`Authorisation::kubernetes`], with other times.
    pub fn kubernetes_for(reviews: ReviewClient, counts: Arc<Counts>, times: Times) -> Self {
        counts.expect_reviews();
        Authorisation::Kubernetes(Arc::new(Authoriser {
            reviews,
            counts,
            tokens: Cache::new(TOKENS),
            token_reviews: Turns::default(),
            named: Access::default(),
            found: Access::default(),
            times,
        }))
    }
}

/// Asks the API server, and keeps its answers for a while.
pub struct Authoriser {
    reviews: ReviewClient,
    counts: Arc<Counts>,
    /// By the token's hash; `None` for one that the API server does not know.
    tokens: Cache<Hash, Option<Arc<Known>>>,
    token_reviews: Turns<TOKEN_REVIEWS>,
    /// Of what questions name: namespaces, and all of them.
    named: Access,
    /// Of namespaces that have tenants here.
    found: Access,
    times: Times,
}

/// Answers to questions about access, and turns to ask them.
struct Access {
    /// By the user's hash and the namespace; empty for all.
    answers: Cache<(Hash, String), bool>,
    reviews: Turns<ACCESS_REVIEWS>,
}

impl Default for Access {
    fn default() -> Self {
        Access { answers: Cache::new(ANSWERS), reviews: Turns::default() }
    }
}

/// Turns to ask: so many at a time, and one for each question.
struct Turns<const N: usize> {
    turns: [Mutex<()>; N],
    hash: RandomState,
}

impl<const N: usize> Default for Turns<N> {
    fn default() -> Self {
        Turns { turns: [const { Mutex::const_new(()) }; N], hash: RandomState::new() }
    }
}

impl<const N: usize> Turns<N> {
    async fn take(&self, question: &impl std::hash::Hash) -> MutexGuard<'_, ()> {
        let number = usize::try_from(self.hash.hash_one(question) >> 32).unwrap_or(0);
        self.turns[number % N].lock().await
    }
}

/// A user that the API server knows.
#[derive(Debug)]
pub(crate) struct Known {
    pub user: User,
    hash: Hash,
}

impl Known {
    fn new(user: User) -> Self {
        let hash = Sha256::digest(serde_json::to_vec(&user).unwrap_or_default()).into();
        Known { user, hash }
    }

    /// The namespace of a service account, where it is one: its own pods are what it asks for.
    fn namespace(&self) -> Option<&str> {
        let (namespace, _) =
            self.user.name.strip_prefix("system:serviceaccount:")?.split_once(':')?;
        (!namespace.is_empty()).then_some(namespace)
    }
}

impl Authoriser {
    /// The user of a request's token.
    pub(crate) async fn user(&self, headers: &HeaderMap) -> Result<Arc<Known>, Refusal> {
        let token = token::of(headers);
        let token = token.map_err(|text| Refusal::new(StatusCode::UNAUTHORIZED, text))?;
        self.timed(self.user_of(token)).await
    }

    async fn user_of(&self, token: &str) -> Result<Arc<Known>, Refusal> {
        let key: Hash = Sha256::digest(token).into();
        let known = |kept: Option<Arc<Known>>| kept.ok_or_else(unknown);
        if let Some(kept) = self.tokens.get(&key, Instant::now()) {
            return known(kept);
        }
        let _turn = self.token_reviews.take(&key).await;
        // Another request with the same token may have asked meanwhile.
        if let Some(kept) = self.tokens.get(&key, Instant::now()) {
            return known(kept);
        }
        let user = self.reviews.user(token).await;
        self.counts.reviewed(Review::Token, user.as_ref().map(Option::is_some));
        let user = user.map_err(|error| away(&error))?.map(|user| Arc::new(Known::new(user)));
        let time = if user.is_some() { self.times.token } else { self.times.unknown };
        self.tokens.put(key, user.clone(), Instant::now(), time);
        known(user)
    }

    /// What a user may see of the namespaces that a question names.
    ///
    /// # Errors
    /// The API server does not answer. Rights on none of them are no error.
    pub(crate) async fn rights_on_named(
        &self,
        known: &Known,
        namespaces: &BTreeSet<String>,
    ) -> Result<Rights, Refusal> {
        self.rights(known, &self.named, namespaces).await
    }

    /// What a user may see of the namespaces that have tenants here, and of a service account's own.
    pub(crate) async fn rights_on_found(
        &self,
        known: &Known,
        mut namespaces: BTreeSet<String>,
    ) -> Result<Rights, Refusal> {
        namespaces.extend(known.namespace().map(str::to_owned));
        self.rights(known, &self.found, &namespaces).await
    }

    async fn rights(
        &self,
        known: &Known,
        access: &Access,
        namespaces: &BTreeSet<String>,
    ) -> Result<Rights, Refusal> {
        self.timed(async {
            if self.may(known, &self.named, "").await? {
                return Ok(Rights::All);
            }
            let mut allowed = BTreeSet::new();
            let asked: Vec<&String> =
                namespaces.iter().filter(|name| is_name(name)).take(NAMESPACES).collect();
            for some in asked.chunks(ACCESS_REVIEWS) {
                let answers = some.iter().map(|name| self.may(known, access, name));
                for (name, answer) in some.iter().zip(join_all(answers).await) {
                    if answer? {
                        allowed.insert((*name).clone());
                    }
                }
            }
            Ok(Rights::Namespaces(allowed))
        })
        .await
    }

    /// Whether a user may get the pods of a namespace; of all where it is empty.
    async fn may(&self, known: &Known, access: &Access, namespace: &str) -> Result<bool, Refusal> {
        let key = (known.hash, namespace.to_owned());
        if let Some(kept) = access.answers.get(&key, Instant::now()) {
            return Ok(kept);
        }
        let _turn = access.reviews.take(&key).await;
        if let Some(kept) = access.answers.get(&key, Instant::now()) {
            return Ok(kept);
        }
        let may = self.reviews.may(&known.user, Verb::Get, namespace).await;
        self.counts.reviewed(Review::Access, may.as_ref().copied());
        let may = may.map_err(|error| away(&error))?;
        let time = if may { self.times.allowed } else { self.times.denied };
        access.answers.put(key, may, Instant::now(), time);
        Ok(may)
    }

    async fn timed<T>(&self, work: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
        let late = || away(&format!("no answer within {:?}", self.times.limit));
        tokio::time::timeout(self.times.limit, work).await.unwrap_or_else(|_| Err(late()))
    }
}

/// A namespace's name, as the API server would accept it (RFC 1123 label): what a client asks for goes into a
/// question to the API server and into a cache.
pub(crate) fn is_name(name: &str) -> bool {
    let letter = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(letter)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn unknown() -> Refusal {
    let text = "the API server does not accept the token: it has expired or is of another cluster; get a new one, \
                for example with kubectl create token SERVICEACCOUNT";
    Refusal::new(StatusCode::UNAUTHORIZED, text)
}

fn away(error: &impl fmt::Display) -> Refusal {
    // The reason may name files and addresses of the plugin's: its log has it.
    tracing::warn!(%error, "nobody can be authorised");
    let text = "nobody can be authorised now: the API server does not answer the plugin's TokenReview or \
                SubjectAccessReview, or forbids it; try again, and see the plugin's log and its ClusterRole";
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text)
}

/// A user without rights on any namespace that is there, or on the one that was asked for.
pub(crate) fn nothing(user: &str, asked: &str) -> Refusal {
    let user = tessera_model::printable::line(user);
    let text = match asked {
        "" => format!(
            "{user} may not get pods in any namespace with tenants here; name your own with ?namespace=NAME, or see \
             kubectl auth can-i get pods"
        ),
        namespace => format!(
            "{user} may not get pods in {}; see kubectl auth can-i get pods --namespace NAME",
            tessera_model::printable::line(namespace)
        ),
    };
    Refusal::new(StatusCode::FORBIDDEN, text)
}

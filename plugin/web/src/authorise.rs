//! Which tenants a caller may see: as the API server says of the token's user, who may read the pods of all
//! namespaces, or of some.
//!
//! The API server is asked for as little as kubelet asks it for its own endpoints, and what it answers is kept as
//! long. Without its answer nobody sees anything. Neither a token nor a part of one is logged or kept: what is kept
//! is found by its SHA-256.
//!
//! Namespaces that a question names are asked about apart from those that have tenants here: whether an answer is at hand
//! says which the reader has named, and nothing of what is there.

use std::collections::BTreeSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::{AUTHORIZATION, HeaderName};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use futures_util::future::join_all;
use lru::LruCache;
use sha2::{Digest, Sha256};
use tessera_cluster::Client;
use tessera_cluster::reviews::UserInfo;
use tessera_system::locks::lock;
use tessera_view::narrow::Rights;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::counts::{ACCESS, Counts, TOKEN};
use crate::source::Refusal;

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
    pub fn kubernetes(reviews: Client, counts: Arc<Counts>) -> Self {
        Self::kubernetes_for(reviews, counts, Times::default())
    }

    /// As [`Authorisation::kubernetes`], with other times.
    pub fn kubernetes_for(reviews: Client, counts: Arc<Counts>, times: Times) -> Self {
        counts.expect_reviews();
        Authorisation::Kubernetes(Arc::new(Authoriser {
            reviews,
            counts,
            tokens: Answers::new(TOKENS),
            named: Answers::new(ANSWERS),
            found: Answers::new(ANSWERS),
            times,
        }))
    }
}

/// Asks the API server, and keeps its answers for a while.
pub struct Authoriser {
    reviews: Client,
    counts: Arc<Counts>,
    /// By the token's hash; `None` for one that the API server does not know.
    tokens: Answers<Hash, Option<Arc<Known>>, TOKEN_REVIEWS>,
    /// Of what questions name: namespaces, and all of them.
    named: Access,
    /// Of namespaces that have tenants here.
    found: Access,
    times: Times,
}

/// Whether users may, by the user's hash and the namespace; empty for all.
type Access = Answers<(Hash, String), bool, ACCESS_REVIEWS>;

/// Answers that are kept for a while, bounded in number and in time, and turns to ask: so many at a time, and one for each
/// question.
struct Answers<K: std::hash::Hash + Eq, V, const N: usize> {
    kept: std::sync::Mutex<LruCache<K, (Instant, V)>>,
    most: usize,
    turns: [Mutex<()>; N],
    hash: RandomState,
}

impl<K: std::hash::Hash + Eq, V: Clone, const N: usize> Answers<K, V, N> {
    /// Of so many at most. What was used longest ago goes first.
    fn new(most: usize) -> Self {
        let turns = [const { Mutex::const_new(()) }; N];
        // Memory is taken as it is needed.
        let kept = std::sync::Mutex::new(LruCache::unbounded());
        Answers { kept, most, turns, hash: RandomState::new() }
    }

    /// What is kept, or else what is answered now, with the time that it holds for.
    async fn get(
        &self,
        key: K,
        ask: impl Future<Output = Result<(V, Duration), Refusal>>,
    ) -> Result<V, Refusal> {
        if let Some(kept) = self.known(&key, Instant::now()) {
            return Ok(kept);
        }
        let number = usize::try_from(self.hash.hash_one(&key) >> 32).unwrap_or(0);
        let _turn = self.turns[number % N].lock().await;
        // Another request may have asked the same meanwhile.
        if let Some(kept) = self.known(&key, Instant::now()) {
            return Ok(kept);
        }
        let (answer, time) = ask.await?;
        self.keep(key, answer.clone(), Instant::now(), time);
        Ok(answer)
    }

    /// What is kept, if its time is not over.
    fn known(&self, key: &K, now: Instant) -> Option<V> {
        let mut kept = lock(&self.kept);
        let (until, value) = kept.get(key)?;
        if now < *until {
            return Some(value.clone());
        }
        kept.pop(key);
        None
    }

    fn keep(&self, key: K, value: V, now: Instant, time: Duration) {
        let mut kept = lock(&self.kept);
        kept.put(key, (now + time, value));
        while kept.len() > self.most {
            kept.pop_lru();
        }
    }
}

/// A user that the API server knows.
#[derive(Debug)]
pub(crate) struct Known {
    user: UserInfo,
    hash: Hash,
}

impl Known {
    fn new(user: UserInfo) -> Self {
        let hash = Sha256::digest(serde_json::to_vec(&user).unwrap_or_default()).into();
        Known { user, hash }
    }

    pub fn name(&self) -> &str {
        self.user.username.as_deref().unwrap_or_default()
    }

    /// The namespace of a service account, where it is one: its own pods are what it asks for.
    fn namespace(&self) -> Option<&str> {
        let (namespace, _) = self.name().strip_prefix("system:serviceaccount:")?.split_once(':')?;
        (!namespace.is_empty()).then_some(namespace)
    }
}

impl Authoriser {
    /// The user of a request's token.
    pub(crate) async fn user(&self, headers: &HeaderMap) -> Result<Arc<Known>, Refusal> {
        let token = token_of(headers);
        let token = token.map_err(|text| Refusal::new(StatusCode::UNAUTHORIZED, text))?;
        self.timed(self.user_of(token)).await
    }

    async fn user_of(&self, token: &str) -> Result<Arc<Known>, Refusal> {
        let asked = self.tokens.get(Sha256::digest(token).into(), async {
            let user = self.reviews.user(token).await;
            self.counts.reviewed(TOKEN, user.as_ref().map(Option::is_some));
            let user = user.map_err(|error| away(&error))?.map(|user| Arc::new(Known::new(user)));
            let time = if user.is_some() { self.times.token } else { self.times.unknown };
            Ok((user, time))
        });
        asked.await?.ok_or_else(unknown)
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
        let asked = access.get((known.hash, namespace.to_owned()), async {
            let may = self.reviews.may_get(&known.user, namespace).await;
            self.counts.reviewed(ACCESS, may.as_ref().copied());
            let may = may.map_err(|error| away(&error))?;
            Ok((may, if may { self.times.allowed } else { self.times.denied }))
        });
        asked.await
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

/// The API server's proxy keeps `Authorization` for itself: through it, this one carries the token.
pub const TESSERA_AUTHORIZATION: HeaderName = HeaderName::from_static("tessera-authorization");

/// Longest token that is passed on to the API server.
const LONGEST_TOKEN: usize = 16 << 10;

/// Why there is none, and what to do.
const ABSENT: &str = "a token is needed: send \"Authorization: Bearer TOKEN\", or through the API server's proxy \
                      \"Tessera-Authorization: Bearer TOKEN\"; kubectl create token SERVICEACCOUNT makes one";
/// A header that is no `Bearer TOKEN`, two of them, or one that is too long.
const MALFORMED: &str = "the header is not \"Bearer TOKEN\" with one token of at most 16 KiB; kubectl create token \
                         SERVICEACCOUNT makes one";

/// The token. Ours goes first: a proxy may have put its own into the other.
fn token_of(headers: &HeaderMap) -> Result<&str, &'static str> {
    let given = |name: &HeaderName| -> Option<Result<&HeaderValue, &'static str>> {
        let mut all = headers.get_all(name).iter();
        let first = all.next()?;
        Some(all.next().map_or(Ok(first), |_| Err(MALFORMED)))
    };
    let value = given(&TESSERA_AUTHORIZATION).or_else(|| given(&AUTHORIZATION));
    let text = value.ok_or(ABSENT)??.to_str().map_err(|_| MALFORMED)?;
    let (scheme, token) = text.trim().split_once(' ').ok_or(MALFORMED)?;
    let token = token.trim();
    let is_token = !token.is_empty()
        && token.len() <= LONGEST_TOKEN
        && token.bytes().all(|b| b.is_ascii_graphic());
    match scheme.eq_ignore_ascii_case("bearer") && is_token {
        true => Ok(token),
        false => Err(MALFORMED),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(given: &[(&HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in given {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn a_token_comes_in_either_header_and_ours_goes_first() {
        let (ours, theirs) = (&TESSERA_AUTHORIZATION, &AUTHORIZATION);
        assert_eq!(token_of(&headers(&[])), Err(ABSENT));
        assert_eq!(token_of(&headers(&[(theirs, "Bearer a.b")])), Ok("a.b"));
        assert_eq!(token_of(&headers(&[(theirs, "Basic eA=="), (ours, "bearer  x ")])), Ok("x"));
        let long = format!("Bearer {}", "x".repeat(LONGEST_TOKEN + 1));
        for bad in ["Basic eA==", "Bearer", "Bearer ", "x", "", "Bearer a b", &long] {
            assert_eq!(token_of(&headers(&[(theirs, bad)])), Err(MALFORMED), "{bad:.20}");
        }
        let twice = headers(&[(ours, "Bearer a"), (ours, "Bearer b"), (theirs, "Bearer c")]);
        assert_eq!(token_of(&twice), Err(MALFORMED));
    }

    proptest! {
        /// Against a model: what is kept was put last under that key, its time is not over, and there are never more
        /// than the bound.
        #[test]
        fn it_keeps_what_was_put_last_no_longer_and_no_more(
            steps in proptest::collection::vec((0u8..20, 0u64..50, 0u64..60, any::<bool>()), 0..200),
        ) {
            let cache = Answers::<u8, usize, 1>::new(8);
            let start = Instant::now();
            let (mut clock, mut put) = (0, std::collections::HashMap::new());
            for (number, (key, after, time, reads)) in steps.into_iter().enumerate() {
                clock += after;
                let now = start + Duration::from_secs(clock);
                if reads {
                    let got = cache.known(&key, now);
                    if let Some(got) = got {
                        let (value, until) = put[&key];
                        prop_assert_eq!(got, value);
                        prop_assert!(clock < until);
                    }
                } else {
                    cache.keep(key, number, now, Duration::from_secs(time));
                    put.insert(key, (number, clock + time));
                    prop_assert!(cache.known(&key, now).is_some() || time == 0, "what is new is there");
                }
                prop_assert!(cache.kept.lock().unwrap().len() <= 8);
            }
        }
    }
}

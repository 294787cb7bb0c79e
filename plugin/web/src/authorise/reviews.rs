//! What is asked of an API server.

use std::future::Future;
use std::pin::Pin;

use tessera_cluster::Verb;
use tessera_cluster::reviews::ReviewClient;
pub use tessera_cluster::reviews::User;

/// Why the API server's word is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReviewError(pub String);

/// An answer that takes time.
pub type Review<'a, T> = Pin<Box<dyn Future<Output = Result<T, ReviewError>> + Send + 'a>>;

/// An API server that knows users and their rights.
pub trait Reviews: Send + Sync + 'static {
    /// The user of a token (`TokenReview`); `None` if it is not accepted.
    fn user<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>>;
    /// Whether a user may `get pods` in a namespace (`SubjectAccessReview`); in all where it is empty.
    fn may_get_pods<'a>(&'a self, user: &'a User, namespace: &'a str) -> Review<'a, bool>;
}

impl Reviews for ReviewClient {
    fn user<'a>(&'a self, token: &'a str) -> Review<'a, Option<User>> {
        Box::pin(async move {
            let user = ReviewClient::user(self, token).await;
            user.map_err(|error| ReviewError(error.to_string()))
        })
    }

    fn may_get_pods<'a>(&'a self, user: &'a User, namespace: &'a str) -> Review<'a, bool> {
        Box::pin(async move {
            let may = self.may(user, Verb::Get, namespace).await;
            may.map_err(|error| ReviewError(error.to_string()))
        })
    }
}

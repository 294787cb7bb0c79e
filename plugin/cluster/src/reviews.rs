//! Users of tokens, and their rights: `TokenReview` and `SubjectAccessReview`.

use std::collections::BTreeMap;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::core::Request;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::{Client, body};
use crate::error::{ApiError, Call, Kind, Verb};

/// A user, as the API server describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct User {
    pub name: String,
    /// Its UID; empty where it has none.
    pub uid: String,
    pub groups: Vec<String>,
    /// What else an authenticator said.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// Asks. A clone shares its connections.
#[derive(Clone, Debug)]
pub struct ReviewClient {
    client: Client,
}

impl ReviewClient {
    pub fn new(client: Client) -> Self {
        ReviewClient { client }
    }

    /// The user of a token for the API server's own audience; `None` if it is not accepted.
    /// Errors: See [`ApiError`]. None has the token in it.
    pub async fn user(&self, token: &str) -> Result<Option<User>, ApiError> {
        let call = &Call::new(Verb::Create, Kind::TOKEN_REVIEWS, "");
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: None };
        let review = TokenReview { spec, ..TokenReview::default() };
        let status = self.create(call, &review).await?.status.unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated.unwrap_or(false));
        Ok(user.map(described).filter(|user| !user.name.is_empty()))
    }

    /// Whether a user may do this with the pods of a namespace; of all where it is empty.
    pub async fn may(&self, user: &User, verb: Verb, namespace: &str) -> Result<bool, ApiError> {
        let call = &Call::new(Verb::Create, Kind::ACCESS_REVIEWS, "");
        let attributes = ResourceAttributes {
            verb: Some(verb.into_str().to_owned()),
            resource: Some("pods".to_owned()),
            namespace: (!namespace.is_empty()).then(|| namespace.to_owned()),
            ..ResourceAttributes::default()
        };
        let spec = SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            uid: (!user.uid.is_empty()).then(|| user.uid.clone()),
            groups: Some(user.groups.clone()),
            extra: Some(user.extra.clone()),
            resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let status = self.create(call, &review).await?.status.unwrap_or_default();
        Ok(status.allowed && !status.denied.unwrap_or(false))
    }

    async fn create<T: Serialize + DeserializeOwned>(
        &self,
        call: &Call,
        review: &T,
    ) -> Result<T, ApiError> {
        let path = format!("/apis/{}/v1/{}", call.kind.group, call.kind.resource);
        let request = Request::new(path).create(&PostParams::default(), body(review));
        self.client.ask(call, request).await
    }
}

fn described(user: UserInfo) -> User {
    User {
        name: user.username.unwrap_or_default(),
        uid: user.uid.unwrap_or_default(),
        groups: user.groups.unwrap_or_default(),
        extra: user.extra.unwrap_or_default(),
    }
}

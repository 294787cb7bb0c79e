//! Users of tokens, and their rights: `TokenReview` and `SubjectAccessReview`.

pub use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::core::Request;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::{Client, body};
use crate::error::{ApiError, Call, Kind, Verb};

impl Client {
    /// The user of a token for the API server's own audience; `None` if it is not accepted.
    /// Errors: See [`ApiError`]. None has the token in it.
    pub async fn user(&self, token: &str) -> Result<Option<UserInfo>, ApiError> {
        let call = &Call::new(Verb::Create, Kind::TOKEN_REVIEWS, "");
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: None };
        let review = TokenReview { spec, ..TokenReview::default() };
        let status = self.review(call, &review).await?.status.unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated.unwrap_or(false));
        Ok(user.filter(|user| user.username.as_ref().is_some_and(|name| !name.is_empty())))
    }

    /// Whether a user may get the pods of a namespace; of all where it is empty.
    pub async fn may_get(&self, user: &UserInfo, namespace: &str) -> Result<bool, ApiError> {
        let call = &Call::new(Verb::Create, Kind::ACCESS_REVIEWS, "");
        let attributes = ResourceAttributes {
            verb: Some(Verb::Get.into_str().to_owned()),
            resource: Some("pods".to_owned()),
            namespace: (!namespace.is_empty()).then(|| namespace.to_owned()),
            ..ResourceAttributes::default()
        };
        let spec = SubjectAccessReviewSpec {
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let status = self.review(call, &review).await?.status.unwrap_or_default();
        Ok(status.allowed && !status.denied.unwrap_or(false))
    }

    async fn review<T: Serialize + DeserializeOwned>(
        &self,
        call: &Call,
        review: &T,
    ) -> Result<T, ApiError> {
        let path = format!("/apis/{}/v1/{}", call.kind.group, call.kind.resource);
        let request = Request::new(path).create(&PostParams::default(), body(review));
        self.ask(call, request).await
    }
}

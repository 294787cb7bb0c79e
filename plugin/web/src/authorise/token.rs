//! The bearer token of a request.

use axum::http::header::{AUTHORIZATION, HeaderName};
use axum::http::{HeaderMap, HeaderValue};

/// The API server's proxy keeps `Authorization` for itself: through it, this one carries the token.
pub const TESSERA_AUTHORIZATION: HeaderName = HeaderName::from_static("tessera-authorization");

/// Longest token that is passed on to the API server.
const LONGEST: usize = 16 << 10;

/// Why there is none, and what to do.
const ABSENT: &str = "a token is needed: send \"Authorization: Bearer TOKEN\", or through the API server's proxy \
                      \"Tessera-Authorization: Bearer TOKEN\"; kubectl create token SERVICEACCOUNT makes one";
/// A header that is no `Bearer TOKEN`, two of them, or one that is too long.
const MALFORMED: &str = "the header is not \"Bearer TOKEN\" with one token of at most 16 KiB; kubectl create token \
                         SERVICEACCOUNT makes one";

/// The token. Ours goes first: a proxy may have put its own into the other.
pub(super) fn of(headers: &HeaderMap) -> Result<&str, &'static str> {
    let given = |name: &HeaderName| -> Option<Result<&HeaderValue, &'static str>> {
        let mut all = headers.get_all(name).iter();
        let first = all.next()?;
        Some(all.next().map_or(Ok(first), |_| Err(MALFORMED)))
    };
    let value = given(&TESSERA_AUTHORIZATION).or_else(|| given(&AUTHORIZATION));
    let text = value.ok_or(ABSENT)??.to_str().map_err(|_| MALFORMED)?;
    let (scheme, token) = text.trim().split_once(' ').ok_or(MALFORMED)?;
    let token = token.trim();
    let is_token =
        !token.is_empty() && token.len() <= LONGEST && token.bytes().all(|b| b.is_ascii_graphic());
    match scheme.eq_ignore_ascii_case("bearer") && is_token {
        true => Ok(token),
        false => Err(MALFORMED),
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(of(&headers(&[])), Err(ABSENT));
        assert_eq!(of(&headers(&[(theirs, "Bearer a.b")])), Ok("a.b"));
        assert_eq!(of(&headers(&[(theirs, "Basic eA=="), (ours, "bearer  x ")])), Ok("x"));
        let long = format!("Bearer {}", "x".repeat(LONGEST + 1));
        for bad in ["Basic eA==", "Bearer", "Bearer ", "x", "", "Bearer a b", &long] {
            assert_eq!(of(&headers(&[(theirs, bad)])), Err(MALFORMED), "{bad:.20}");
        }
        let twice = headers(&[(ours, "Bearer a"), (ours, "Bearer b"), (theirs, "Bearer c")]);
        assert_eq!(of(&twice), Err(MALFORMED));
    }
}

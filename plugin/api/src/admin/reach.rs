//! The way to the plugin.

use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tessera_view::status::{STATUS, Status};
use tessera_web::client::{Client, ClientError};

/// How long the plugin may take to answer.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// Exit status when the plugin does not answer, or has nothing to answer about: `EX_UNAVAILABLE`.
pub const EXIT_UNAVAILABLE: u8 = 69;
/// Exit status when the caller may not ask it: `EX_NOPERM`.
pub const EXIT_FORBIDDEN: u8 = 77;

/// Exit status when the command line is wrong, and trying again will not help: `EX_USAGE`.
pub const EXIT_USAGE: u8 = 64;

/// How often a broken connection is made again, and after how long.
const ATTEMPTS: usize = 3;
const BETWEEN: Duration = Duration::from_millis(100);

/// A client of the plugin at `socket`, `paths.admin`.
pub fn client(socket: &Path, limit: Duration) -> Client {
    Client::at(socket).with_limit(limit)
}

/// What may be asked twice: again, where the connection broke. A plugin whose socket is flooded makes room by closing
/// connections, and the next one is served.
pub async fn get<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    limit: Duration,
) -> Result<T, ClientError> {
    let client = client(socket, limit);
    for _ in 1..ATTEMPTS {
        match client.get(path).await {
            Err(ClientError::NoAnswer { .. }) => tokio::time::sleep(BETWEEN).await,
            answer => return answer,
        }
    }
    client.get(path).await
}

/// The plugin's status.
pub async fn ask(socket: &Path) -> Result<Status, ClientError> {
    get(socket, STATUS, TIMEOUT).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_to_be_unreachable_has_its_sentence_with_what_to_do() {
        let (socket, at) = (|| "/run/x.sock".into(), || "/run/x.sock".to_owned());
        let causes = [
            (ClientError::Missing(socket()), 69),
            (ClientError::Deserted(socket()), 69),
            (ClientError::Forbidden(socket()), 77),
            (ClientError::Late { at: at(), seconds: 10 }, 69),
            (ClientError::NoAnswer { at: at(), reason: "broken pipe".into() }, 69),
        ];
        let mut all = std::collections::BTreeSet::new();
        for (cause, status) in causes {
            assert!(cause.is_silence() && cause.exit() == status, "{cause:?}");
            let text = cause.to_string();
            assert!(text.contains("/run/x.sock"), "{text}");
            assert!(text.contains("kubectl") || text.contains("pod's log"), "{text}");
            all.insert(text);
        }
        assert_eq!(all.len(), 5);
    }
}

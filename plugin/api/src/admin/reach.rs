//! The way to the plugin, and what is to be done where there is none.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tessera_config::Config;
use tessera_model::printable;
use tessera_view::change::Call;
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

/// The plugin cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreachable {
    /// Where it was looked for.
    pub socket: PathBuf,
    /// What stands in the way.
    pub cause: Cause,
}

/// What stands in the way to the plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    NoSocket,
    /// There is one, and nobody listens.
    NobodyListens,
    /// The caller is not root.
    Forbidden,
    /// It took the call and did not answer within so many seconds.
    Late(u64),
    /// The connection broke, or anything else: the system's words.
    Broken(String),
}

/// What a machine shows of Tessera without a plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traces {
    /// There are pages or a ledger.
    pub has_run: bool,
    /// There is an NVIDIA driver.
    pub has_gpus: bool,
}

impl Traces {
    /// Of this machine.
    pub fn look(config: &Config) -> Self {
        // What may not be looked at is there, as far as anybody can tell.
        let is_there = |path: &Path| path.try_exists().unwrap_or(true);
        let has_pages = std::fs::read_dir(&config.paths.pages).map_or_else(
            |error| error.kind() != io::ErrorKind::NotFound,
            |mut dir| dir.next().is_some(),
        );
        let driver = ["/dev/nvidiactl", "/proc/driver/nvidia/version"];
        Traces {
            has_run: has_pages || is_there(&config.paths.ledger),
            has_gpus: driver.into_iter().any(|path| is_there(Path::new(path))),
        }
    }
}

impl Unreachable {
    /// Where the plugin was asked at this socket, and nobody answered. `None` where the plugin did.
    pub fn of(error: &ClientError, socket: &Path) -> Option<Self> {
        let cause = match error {
            ClientError::Missing(_) => Cause::NoSocket,
            ClientError::Deserted(_) => Cause::NobodyListens,
            ClientError::Forbidden(_) => Cause::Forbidden,
            ClientError::Late { seconds, .. } => Cause::Late(*seconds),
            ClientError::NoAnswer { reason, .. } => Cause::Broken(in_words(reason)),
            ClientError::Denied(_) | ClientError::Refused(_) | ClientError::Unreadable { .. } => {
                return None;
            }
        };
        Some(Unreachable { socket: socket.to_owned(), cause })
    }

    /// The exit status of a command that cannot do without the plugin.
    pub fn exit_status(&self) -> u8 {
        if self.cause == Cause::Forbidden { EXIT_FORBIDDEN } else { EXIT_UNAVAILABLE }
    }

    /// What is wrong and what to do, with what this machine tells besides.
    pub fn sentence(&self, config: &Config) -> String {
        self.in_view_of(Traces::look(config))
    }

    /// See [`Unreachable::sentence`].
    pub fn in_view_of(&self, traces: Traces) -> String {
        let socket = self.socket.display();
        match (&self.cause, traces) {
            (Cause::NoSocket, Traces { has_run: false, has_gpus: false }) => format!(
                "this machine has neither NVIDIA GPUs (there is no /dev/nvidiactl) nor Tessera (there is no \
                 socket at {socket}); ask on a node with GPUs, in the plugin's pod there: {IN_POD}"
            ),
            (Cause::NoSocket, Traces { has_run: false, .. }) => format!(
                "Tessera does not run on this machine, and has not run: there is no socket at {socket}, and \
                 neither ledger nor pages; in a cluster ask in the plugin's pod: {IN_POD}; where it runs with \
                 another configuration, name that with --config"
            ),
            _ => self.to_string(),
        }
    }
}

/// How a command is run where the plugin is.
const IN_POD: &str = "`kubectl -n tessera exec ds/tessera -- tessera …`";
/// Where a plugin says why it ended.
const LOOK: &str = "see its pod and that pod's log (`kubectl -n tessera get pods -o wide`), or start `tessera serve`";

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let socket = self.socket.display();
        match &self.cause {
            Cause::NoSocket => {
                write!(
                    f,
                    "the plugin does not answer: there is no socket at {socket}, so it is not running; {LOOK}"
                )
            }
            Cause::NobodyListens => {
                write!(
                    f,
                    "the plugin does not answer: nobody listens at {socket}, so it has ended or was killed; {LOOK}"
                )
            }
            Cause::Forbidden => write!(
                f,
                "permission denied: only root may ask the plugin at {socket}, and this is uid {}; try again \
                 with sudo, or in the plugin's pod: {IN_POD}",
                nix::unistd::geteuid()
            ),
            Cause::Late(seconds) => write!(
                f,
                "the plugin does not answer at {socket} within {seconds} s: it hangs, or the machine is overloaded; \
                 its pod's log says more, and kubelet restarts it when its liveness probe fails",
            ),
            Cause::Broken(why) => write!(
                f,
                "the plugin does not answer at {socket}: {why}; it may be restarting: try again, and see its \
                 pod's log",
            ),
        }
    }
}

impl Error for Unreachable {}

/// The system's words without its number.
fn in_words(error: &dyn fmt::Display) -> String {
    let text = error.to_string();
    let text = text.split(" (os error ").next().unwrap_or_default();
    printable::line(text).into_owned()
}

/// How often a broken connection is made again, and after how long.
const ATTEMPTS: usize = 3;
const BETWEEN: Duration = Duration::from_millis(100);

/// A client of the plugin at `socket`, `paths.admin`.
pub fn client(socket: &Path, limit: Duration) -> Client {
    Client::at(socket).with_limit(limit)
}

/// Asks the plugin for a change, or to judge one.
///
/// # Errors
/// It does not answer, or refuses.
pub async fn call<C: Call>(socket: &Path, request: &C) -> Result<C::Answer, ClientError> {
    client(socket, TIMEOUT).call(request).await
}

/// What may be asked twice: again, where the connection broke. A plugin whose socket is flooded makes room by closing
/// connections, and the next one is served.
///
/// # Errors
/// As the last attempt's.
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

/// Waits for an answer where there is no runtime.
///
/// # Errors
/// No runtime.
pub fn now<T>(answer: impl Future<Output = T>) -> io::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(answer))
}

/// The plugin's status.
///
/// # Errors
/// It does not answer.
pub async fn ask(socket: &Path) -> Result<Status, Unreachable> {
    let status = get(socket, STATUS, TIMEOUT).await;
    status.map_err(|error| {
        Unreachable::of(&error, socket).unwrap_or_else(|| Unreachable {
            socket: socket.to_owned(),
            cause: Cause::Broken(printable::line(&error.to_string()).into_owned()),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable(cause: Cause) -> Unreachable {
        Unreachable { socket: "/run/x.sock".into(), cause }
    }

    #[test]
    fn each_way_to_be_unreachable_has_its_sentence_with_what_to_do() {
        let causes = [
            Cause::NoSocket,
            Cause::NobodyListens,
            Cause::Forbidden,
            Cause::Late(10),
            Cause::Broken("broken pipe".into()),
        ];
        let mut all = Vec::new();
        for cause in causes {
            for (has_run, has_gpus) in [(false, false), (false, true), (true, true)] {
                let text = unreachable(cause.clone()).in_view_of(Traces { has_run, has_gpus });
                assert!(text.contains("/run/x.sock") && !text.contains("os error"), "{text}");
                assert!(text.contains("kubectl") || text.contains("pod's log"), "{text}");
                all.push(text);
            }
        }
        all.dedup();
        assert_eq!(all.len(), 7, "three without a socket, and one for each other: {all:#?}");
    }

    #[test]
    fn only_a_missing_permission_exits_with_77() {
        assert_eq!(unreachable(Cause::Forbidden).exit_status(), 77);
        assert_eq!(unreachable(Cause::NoSocket).exit_status(), 69);
        assert_eq!(unreachable(Cause::Late(10)).exit_status(), 69);
    }

    #[tokio::test]
    async fn what_the_system_says_becomes_a_cause() {
        let dir = std::env::temp_dir().join(format!("tessera-reach-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let cause = async |name: &str| ask(&dir.join(name)).await.unwrap_err().cause;
        assert_eq!(cause("none").await, Cause::NoSocket);
        drop(std::os::unix::net::UnixListener::bind(dir.join("left")).unwrap());
        assert_eq!(cause("left").await, Cause::NobodyListens);
        std::fs::write(dir.join("file"), "").unwrap();
        assert_eq!(cause("file").await, Cause::NobodyListens);
        assert!(matches!(cause("file/below").await, Cause::Broken(_)));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

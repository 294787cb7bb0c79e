//! The way to the plugin, and what is to be done where there is none.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tessera_kubelet_api::admin::admin_client::AdminClient;
use tessera_kubelet_api::admin::{StatusRequest, StatusResponse};
use tessera_model::printable;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use tessera_config::Config;
use tessera_system::files::check_peer;
use tessera_web::client::{ClientError, socket_beside};

/// How long the plugin may take to answer.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// Exit status when the plugin does not answer, or has nothing to answer about: `EX_UNAVAILABLE`.
pub const EXIT_UNAVAILABLE: u8 = 69;
/// Exit status when the caller may not ask it: `EX_NOPERM`.
pub const EXIT_FORBIDDEN: u8 = 77;

/// Exit status when the command line is wrong, and trying again will not help: `EX_USAGE`.
pub const EXIT_USAGE: u8 = 64;

/// Most bytes of an answer: a node has thousands of allocations at most.
const LARGEST: usize = 64 << 20;

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
    /// It took the call and did not answer in time.
    Late,
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
    /// Where the API's socket beside this admin socket was asked, and nobody answered. `None` where the plugin did.
    pub fn of_api(error: &ClientError, admin: &Path) -> Option<Self> {
        let cause = match error {
            ClientError::Missing(_) => Cause::NoSocket,
            ClientError::Deserted(_) => Cause::NobodyListens,
            ClientError::Forbidden(_) => Cause::Forbidden,
            ClientError::NoAnswer { reason, .. } => Cause::Broken(in_words(reason)),
            ClientError::Denied(_) | ClientError::Refused(_) | ClientError::Unreadable { .. } => {
                return None;
            }
        };
        Some(Unreachable { socket: socket_beside(admin), cause })
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
            Cause::Late => write!(
                f,
                "the plugin does not answer at {socket} within {} s: it hangs, or the machine is overloaded; \
                 its pod's log says more, and kubelet restarts it when its liveness probe fails",
                TIMEOUT.as_secs()
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

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nobody could be asked.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// The plugin refuses.
    #[error("{}", .0.message())]
    Refused(Status),
}

/// The system's words without its number.
fn in_words(error: &dyn fmt::Display) -> String {
    let text = error.to_string();
    let text = text.split(" (os error ").next().unwrap_or_default();
    printable::line(text).into_owned()
}

/// The last in the chain of causes; tonic's own text is only "transport error".
fn root(error: &(dyn Error + 'static)) -> (Option<io::ErrorKind>, String) {
    let mut cause: &(dyn Error + 'static) = error;
    let mut kind = None;
    loop {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            kind = Some(io.kind());
        }
        match cause.source() {
            Some(source) => cause = source,
            None => return (kind, in_words(&cause)),
        }
    }
}

/// A client of the admin service at `socket`.
///
/// # Errors
/// Nobody answers there, or the socket may not be opened.
pub async fn connect(socket: &Path) -> Result<AdminClient<Channel>, Unreachable> {
    let unreachable = |cause| Unreachable { socket: socket.to_owned(), cause };
    // Not by its address, so that it is seen who listens: with a configuration of somebody else's, anybody may.
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move {
            let stream = UnixStream::connect(path).await?;
            // Not as what the system says to a caller who may not connect: that one is told to use sudo.
            check_peer(&stream).map_err(|error| io::Error::other(error.to_string()))?;
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    let endpoint = Endpoint::from_static("http://tessera");
    let channel = endpoint.connect_with_connector(connector).await.map_err(|error| {
        let (kind, words) = root(&error);
        unreachable(match kind {
            Some(io::ErrorKind::NotFound) => Cause::NoSocket,
            Some(io::ErrorKind::ConnectionRefused) => Cause::NobodyListens,
            Some(io::ErrorKind::PermissionDenied) => Cause::Forbidden,
            _ => Cause::Broken(words),
        })
    })?;
    Ok(AdminClient::new(channel).max_decoding_message_size(LARGEST))
}

/// How often a broken connection is made again, and after how long.
const ATTEMPTS: usize = 3;
const BETWEEN: std::time::Duration = std::time::Duration::from_millis(100);

/// Asks the plugin one thing.
///
/// # Errors
/// It does not answer, or refuses.
pub async fn call<T, F>(
    socket: &Path,
    ask: impl FnOnce(AdminClient<Channel>) -> F,
) -> Result<T, CallError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let unreachable = |cause| Unreachable { socket: socket.to_owned(), cause };
    let asking = async {
        ask(connect(socket).await?).await.map(Response::into_inner).map_err(|status| {
            // What the plugin itself says has no cause on this side.
            match status.source() {
                Some(source) => unreachable(Cause::Broken(root(source).1)).into(),
                None => CallError::Refused(status),
            }
        })
    };
    let answer = tokio::time::timeout(TIMEOUT, asking).await;
    answer.unwrap_or_else(|_| Err(unreachable(Cause::Late).into()))
}

/// Asks again what may be asked twice, where the connection broke: a plugin whose socket is flooded makes room by
/// closing connections, and the next one is served.
///
/// # Errors
/// As the last attempt's.
pub(super) async fn again_if_broken<T>(
    ask: impl AsyncFn() -> Result<T, CallError>,
) -> Result<T, CallError> {
    for _ in 1..ATTEMPTS {
        match ask().await {
            Err(CallError::Unreachable(Unreachable { cause: Cause::Broken(_), .. })) => {
                tokio::time::sleep(BETWEEN).await;
            }
            answer => return answer,
        }
    }
    ask().await
}

/// The same for who has no runtime.
///
/// # Errors
/// It does not answer, or refuses; the outer error: no runtime.
pub fn call_now<T, F>(
    socket: &Path,
    ask: impl FnOnce(AdminClient<Channel>) -> F,
) -> io::Result<Result<T, CallError>>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(call(socket, ask)))
}

/// The plugin's answer to Status.
///
/// # Errors
/// It does not answer.
pub async fn ask(socket: &Path) -> Result<StatusResponse, Unreachable> {
    let status =
        async || call(socket, async |mut client| client.status(StatusRequest {}).await).await;
    again_if_broken(status).await.map_err(|error| match error {
        CallError::Unreachable(unreachable) => unreachable,
        CallError::Refused(status) => Unreachable {
            socket: socket.to_owned(),
            cause: Cause::Broken(printable::line(status.message()).into_owned()),
        },
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
            Cause::Late,
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
        assert_eq!(unreachable(Cause::Late).exit_status(), 69);
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

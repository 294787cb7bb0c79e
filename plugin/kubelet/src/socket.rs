//! The plugin's sockets in kubelet's device plugin directory: names, making, removing.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::net::UnixListener;

use tessera_model::short_name;
use tessera_system::files;
use tessera_system::files::{Dir, SocketFile};

/// Kubelet has it compiled in (`DevicePluginPath` of its device plugin API), so it does not move with --root-dir, as
/// pod-resources, plugins and `plugins_registry` do.
const DIRECTORY: &str = "/var/lib/kubelet/device-plugins";

/// Bytes that fit into `sockaddr_un.sun_path` with its NUL (unix(7)).
const MAX_PATH: usize = 107;

/// Characters of the resource's name in a socket's name, so that this fits into kubelet's directory.
const MAX_SLUG: usize = 32;

#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "kubelet's device plugin directory {0} does not exist: kubelet makes {DIRECTORY} at its start, whatever its \
         --root-dir; set paths.kubelet to that, and mount it into this container"
    )]
    NoDirectory(PathBuf),
    #[error(
        "the socket path {0} is longer than {MAX_PATH} bytes: use a shorter device plugin directory \
         or resource name"
    )]
    TooLong(PathBuf),
    #[error("cannot listen on {path}: {source}")]
    Listen { path: PathBuf, source: io::Error },
}

/// What distinguishes one file from another that has taken its name. The inode number alone does not: tmpfs
/// and ext4 use it again at once. The time of birth does, and unlike the time of change it survives
/// chmod and relabelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    /// Where the file system knows no birth, the last change.
    born: Option<SystemTime>,
}

impl Identity {
    pub(super) fn of(path: &Path) -> Option<Self> {
        std::fs::symlink_metadata(path).ok().map(|metadata| Self::from(&metadata))
    }
}

impl From<&Metadata> for Identity {
    fn from(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            born: metadata.created().ok().or_else(|| changed(metadata)),
        }
    }
}

fn changed(metadata: &Metadata) -> Option<SystemTime> {
    let seconds = Duration::from_secs(u64::try_from(metadata.ctime()).ok()?);
    let nanos = Duration::from_nanos(u64::try_from(metadata.ctime_nsec()).ok()?);
    Some(UNIX_EPOCH + seconds + nanos)
}

/// Makes socket names that no other start of the plugin makes: `tessera-<resource>-<pid>-<start>-<n>.sock`.
/// The start time is needed because in a container of its own the plugin's pid is always the same.
#[derive(Debug)]
pub(super) struct Names {
    prefix: String,
    start_ms: u128,
}

impl Names {
    pub(super) fn new(resource_name: &str) -> Self {
        let slug: String = resource_name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' })
            .collect();
        // Kubernetes allows names that would not fit into a socket's path.
        let slug = match slug.len() > MAX_SLUG {
            true => short_name::with_hash(&slug, MAX_SLUG, resource_name),
            false => slug,
        };
        let start_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        Self { prefix: format!("tessera-{slug}-"), start_ms }
    }

    pub(super) fn next(&self) -> String {
        // Resources may differ in a character that the name does not show.
        static COUNT: AtomicU32 = AtomicU32::new(1);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let (prefix, pid) = (&self.prefix, std::process::id());
        format!("{prefix}{pid}-{:x}-{count}.sock", self.start_ms)
    }

    /// Whether a plugin for the same resource may have made this name.
    fn is_ours(&self, name: &str) -> bool {
        name.strip_prefix(&self.prefix).and_then(|rest| rest.strip_suffix(".sock")).is_some_and(
            |rest| {
                let mut parts = rest.split('-');
                let mut hex =
                    || parts.next().is_some_and(|part| part.chars().all(|c| c.is_ascii_hexdigit()));
                hex() && hex() && hex() && parts.next().is_none()
            },
        )
    }
}

/// A listening socket; its file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// Kubelet may have removed it long ago.
    _file: SocketFile,
}

impl Socket {
    /// Listens on `name` in `dir`. Only root may connect.
    pub(super) fn listen(dir: &Path, name: String) -> Result<(Self, UnixListener), SocketError> {
        let path = dir.join(&name);
        if !dir.is_dir() {
            return Err(SocketError::NoDirectory(dir.to_path_buf()));
        }
        if path.as_os_str().len() > MAX_PATH {
            return Err(SocketError::TooLong(path));
        }
        let listen = || {
            let (file, listener) = SocketFile::listen(&path)?;
            listener.set_nonblocking(true)?;
            Ok((file, UnixListener::from_std(listener)?))
        };
        match listen() {
            Ok((file, listener)) => Ok((Self { name, path, _file: file }, listener)),
            Err(source) => Err(SocketError::Listen { path, source }),
        }
    }
}

/// Removes sockets of earlier instances. A socket that somebody accepts on stays: two plugins for one
/// resource are a mistake, but not one that silence would mend.
pub(super) fn remove_stale(dir: &Path, names: &Names, own: &str) {
    let Ok(dir) = Dir::open_trusted(dir) else { return };
    for name in dir.names().unwrap_or_default() {
        let Some(name) = name.to_str().filter(|name| names.is_ours(name) && *name != own) else {
            continue;
        };
        match files::remove_stale(&dir, OsStr::new(name)) {
            Ok(()) => tracing::info!(socket = name, "removed an earlier instance's socket"),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => tracing::warn!(
                socket = name,
                "another running plugin serves this resource on this node; each will keep taking it \
                 from the other: stop one"
            ),
            // Something else has the name.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => tracing::warn!(socket = name, %error, "cannot remove an old socket"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn names_are_unique_and_recognised_only_for_the_same_resource() {
        let names = Names::new("tessera.dev/gpu");
        let (first, second) = (names.next(), names.next());
        assert_ne!(first, second);
        assert!(first.starts_with("tessera-tessera.dev-gpu-"));
        assert!(names.is_ours(&first));
        // A resource whose name begins like ours is another one.
        assert!(!names.is_ours(&Names::new("tessera.dev/gpu-large").next()));
        assert!(!names.is_ours("kubelet.sock"));
        assert!(!names.is_ours("tessera-tessera.dev-gpu-notes.sock"));
    }

    #[test]
    fn names_of_any_resource_fit_into_kubelets_directory_and_differ() {
        let long =
            |leaf: &str| format!("shares.gpu.platform.example.com/{}-{leaf}", "x".repeat(60));
        let (a, b) = (Names::new(&long("a")), Names::new(&long("b")));
        let (name, other) = (a.next(), b.next());
        // Larger pids and counts take up to six digits more.
        assert!("/var/lib/kubelet/device-plugins/".len() + name.len() + 8 <= MAX_PATH, "{name}");
        assert!(a.is_ours(&name) && !a.is_ours(&other), "{name} {other}");
        // Names that look alike get sockets of their own.
        assert_ne!(Names::new("a.b/c_d").next(), Names::new("a.b/c-d").next());
    }

    #[test]
    fn a_file_stays_the_same_when_its_mode_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubelet.sock");
        std::fs::write(&path, "").unwrap();
        if std::fs::metadata(&path).unwrap().created().is_err() {
            return;
        }
        let before = Identity::of(&path);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(Identity::of(&path), before);
    }

    #[tokio::test]
    async fn stale_sockets_go_and_living_ones_stay() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names::new("tessera.dev/gpu");
        let (stale, living, own) = (names.next(), names.next(), names.next());
        drop(std::os::unix::net::UnixListener::bind(dir.path().join(&stale)).unwrap());
        let (living, _listener) = Socket::listen(dir.path(), living).unwrap();
        let (own, _own_listener) = Socket::listen(dir.path(), own).unwrap();
        std::fs::write(dir.path().join("kubelet_internal_checkpoint"), "{}").unwrap();
        remove_stale(dir.path(), &names, &own.name);
        assert!(!dir.path().join(stale).exists());
        assert!(living.path.exists());
        assert!(own.path.exists());
        assert!(dir.path().join("kubelet_internal_checkpoint").exists());
    }

    #[test]
    fn a_missing_directory_and_a_long_path_say_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let error = Socket::listen(&dir.path().join("none"), "a.sock".into()).unwrap_err();
        assert!(error.to_string().contains("--root-dir"), "{error}");
        let error = Socket::listen(dir.path(), "a".repeat(120)).unwrap_err();
        assert!(error.to_string().contains("107 bytes"), "{error}");
    }

    #[tokio::test]
    async fn a_dropped_socket_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, _listener) = Socket::listen(dir.path(), "a.sock".into()).unwrap();
        let path = socket.path.clone();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }
}

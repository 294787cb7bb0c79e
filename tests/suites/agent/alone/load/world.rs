//! What is around the plugin: a wall clock that is set, and an API server of every temper.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, Stream};
use serde_json::{Value, json};
use tessera_harness::CProgram;

/// An hour, in the seconds that a [`Clock`] is set by.
pub const HOUR: i64 = 3600;

/// The wall clock of every process with [`Clock::envs`], every other clock being the machine's; and what that has
/// on its heap.
pub struct Clock {
    library: PathBuf,
    shared: PathBuf,
}

impl Clock {
    pub fn new(dir: &Path) -> Self {
        let library = CProgram::new("around").shared().build();
        let shared = dir.join("around");
        std::fs::write(&shared, [0; 16]).unwrap();
        Self { library, shared }
    }

    pub fn envs(&self) -> Vec<(&'static str, OsString)> {
        vec![("LD_PRELOAD", (&self.library).into()), ("AROUND", (&self.shared).into())]
    }

    /// So many seconds before or after the machine's.
    pub fn set(&self, seconds: i64) {
        // In place: it is mapped.
        let file = std::fs::File::options().write(true).open(&self.shared).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    /// Bytes on the heap when the clock was last read.
    pub fn heap(&self) -> u64 {
        let mut word = [0; 8];
        std::fs::File::open(&self.shared).unwrap().read_exact_at(&mut word, 8).unwrap();
        u64::from_ne_bytes(word)
    }
}

/// How the API server takes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Temper {
    /// Nobody is there.
    Absent,
    /// It accepts connections, and says nothing.
    Silent,
    /// It answers one byte a second.
    Slow,
    /// It answers at once: 403.
    Forbids,
    /// It takes everything.
    Takes,
}

/// An API server behind TLS, with the credentials that kubelet would mount into a pod.
pub struct Api {
    port: u16,
    credentials: PathBuf,
    temper: Arc<Mutex<Temper>>,
    /// Bodies of requests, in whatever way they were answered.
    asked: Arc<Mutex<Vec<Value>>>,
    ends: Arc<AtomicBool>,
}

impl Api {
    /// In this directory.
    pub fn start(dir: &Path, temper: Temper) -> Self {
        let credentials = dir.join("credentials");
        std::fs::create_dir_all(&credentials).unwrap();
        std::fs::write(credentials.join("token"), "secret\n").unwrap();
        // Valid whatever the clock says.
        let made = tessera_web::self_signed(&["127.0.0.1"]).unwrap();
        std::fs::write(credentials.join("ca.crt"), made.certificate.pem()).unwrap();

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (asked, ends) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        let api = Api { port, credentials, temper: Arc::new(Mutex::new(temper)), asked, ends };
        if temper == Temper::Absent {
            return api;
        }
        let config = Arc::new(tls(made.certificate.der().clone(), made.key));
        let (temper, asked) = (Arc::clone(&api.temper), Arc::clone(&api.asked));
        let ends = Arc::clone(&api.ends);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                let (config, temper) = (Arc::clone(&config), Arc::clone(&temper));
                let (asked, ends) = (Arc::clone(&asked), Arc::clone(&ends));
                // A client that goes away is none of the server's business.
                std::thread::spawn(move || serve(stream, config, &temper, &asked, &ends));
            }
        });
        api
    }

    /// What tells a plugin where it is; it needs [`Clock::envs`], too.
    pub fn envs(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("KUBERNETES_SERVICE_HOST", "127.0.0.1".into()),
            ("KUBERNETES_SERVICE_PORT", self.port.to_string().into()),
            ("CREDENTIALS", (&self.credentials).into()),
        ]
    }

    pub fn asked(&self) -> Vec<Value> {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn tls(certificate: CertificateDer<'static>, key: PrivatePkcs8KeyDer<'static>) -> ServerConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    builder.with_single_cert(vec![certificate], key.into()).unwrap()
}

fn serve(
    mut stream: TcpStream,
    config: Arc<ServerConfig>,
    temper: &Mutex<Temper>,
    asked: &Mutex<Vec<Value>>,
    ends: &AtomicBool,
) -> Option<()> {
    let temper = || *temper.lock().unwrap();
    while temper() == Temper::Silent {
        if ends.load(Ordering::Relaxed) {
            return None;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut connection = ServerConnection::new(config).ok()?;
    let mut stream = Stream::new(&mut connection, &mut stream);
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).ok()?;
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).ok()?.to_lowercase();
        let length = head.split("content-length: ").nth(1)?.split("\r\n").next()?;
        let mut body = vec![0; length.parse().ok()?];
        stream.read_exact(&mut body).ok()?;
        asked.lock().unwrap().push(serde_json::from_slice(&body).ok()?);
        let (status, text) = match temper() {
            Temper::Forbids => (403, json!({ "message": "events is forbidden" }).to_string()),
            _ => (201, "{}".to_owned()),
        };
        let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{text}", text.len());
        if temper() == Temper::Slow {
            for byte in answer.bytes() {
                if ends.load(Ordering::Relaxed) {
                    return None;
                }
                stream.write_all(&[byte]).and_then(|()| stream.flush()).ok()?;
                std::thread::sleep(Duration::from_secs(1));
            }
        } else {
            stream.write_all(answer.as_bytes()).and_then(|()| stream.flush()).ok()?;
        }
    }
}

//! A request as kubelet makes it: one connection, one answer, a time limit, no second try.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longer than kubelet waits: a busy machine is slow, and how soon probes are answered is the bench's to say
/// (`probe_p99_ms_flood`). One that is given up, or waits in vain, is seen all the same.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The whole answer.
pub fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: node\r\nUser-Agent: kube-probe/1.34\r\n\
        Accept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Whether it is answered with 200.
pub fn probe(address: SocketAddr, path: &str) -> Result<(), String> {
    match get(address, path) {
        Ok(answer) if answer.starts_with("HTTP/1.1 200 ") => Ok(()),
        Ok(answer) => Err(format!("{path}: {answer:?}")),
        Err(error) => Err(format!("{path}: {error}")),
    }
}

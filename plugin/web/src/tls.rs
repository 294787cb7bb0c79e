//! The server's certificate: of files, read again now and then, or made at the start.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rcgen::{
    Certificate, CertificateParams, Error, PKCS_ECDSA_P256_SHA256, PublicKeyData, SerialNumber,
    SignatureAlgorithm, SigningKey,
};
use ring::error::{KeyRejected, Unspecified};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tessera_system::files;
use tessera_system::locks::lock;

/// How often the files are read again.
const LOOK: Duration = Duration::from_secs(10);

/// How TCP connections are protected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tls {
    /// Not: only for loopback.
    Plain,
    /// With a certificate of its own, as kubelet serves without one: the API server's proxy does not verify it.
    SelfSigned,
    /// With these PEM files.
    Files {
        /// The certificate, and those between it and the authority.
        certificate: PathBuf,
        key: PathBuf,
    },
}

/// The configuration; `None` for [`Tls::Plain`]. Reads files.
pub(crate) fn config(tls: &Tls) -> Result<Option<Arc<ServerConfig>>, String> {
    let resolver: Arc<dyn ResolvesServerCert> = match tls {
        Tls::Plain => return Ok(None),
        Tls::SelfSigned => Arc::new(SingleCertAndKey::from(made()?)),
        Tls::Files { certificate, key } => Arc::new(Files::open(certificate, key)?),
    };
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let builder =
        builder.with_safe_default_protocol_versions().map_err(|error| error.to_string())?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(Arc::new(config)))
}

fn made() -> Result<CertifiedKey, String> {
    let made = self_signed(&["tessera", "localhost", "127.0.0.1", "::1"])
        .map_err(|error| error.to_string())?;
    certified(vec![made.certificate.der().clone()], made.key.into())
}

fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<CertifiedKey, String> {
    CertifiedKey::from_der(chain, key, &default_provider()).map_err(|error| error.to_string())
}

/// A certificate that others renew, as cert-manager does.
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    /// When they were read, and what they held.
    now: Mutex<(Instant, Arc<CertifiedKey>)>,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl Files {
    fn open(certificate: &std::path::Path, key: &std::path::Path) -> Result<Self, String> {
        let now = Mutex::new((Instant::now(), Arc::new(read(certificate, key)?)));
        Ok(Files { certificate: certificate.into(), key: key.into(), now })
    }
}

impl ResolvesServerCert for Files {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let mut now = lock(&self.now);
        if now.0.elapsed() >= LOOK {
            now.0 = Instant::now();
            match read(&self.certificate, &self.key) {
                Ok(key) => now.1 = Arc::new(key),
                // It may be half written: the old one serves until the next look.
                Err(error) => tracing::warn!(%error, "the old certificate stays"),
            }
        }
        Some(Arc::clone(&now.1))
    }
}

fn read(certificate: &std::path::Path, key: &std::path::Path) -> Result<CertifiedKey, String> {
    let amiss = |name: &str, path: &std::path::Path, error: &dyn std::fmt::Display| {
        format!("{name} {}: {error}", path.display())
    };
    let cert_amiss = |error: &dyn std::fmt::Display| amiss("api.tls_cert", certificate, error);
    let key_amiss = |error: &dyn std::fmt::Display| amiss("api.tls_key", key, error);
    let pem = files::read(certificate, files::SMALL).map_err(|error| cert_amiss(&error))?;
    let chain = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| cert_amiss(&error))?;
    if chain.is_empty() {
        return Err(cert_amiss(&"there is no certificate in it"));
    }
    let pem = files::read(key, files::SMALL).map_err(|error| key_amiss(&error))?;
    let key_der = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| key_amiss(&error))?;
    certified(chain, key_der).map_err(|error| {
        format!("api.tls_cert {} and api.tls_key {}: {error}", certificate.display(), key.display())
    })
}

/// A certificate and its key.
#[derive(Debug)]
pub struct SelfSigned {
    /// Valid at all times.
    pub certificate: Certificate,
    /// PKCS #8.
    pub key: PrivatePkcs8KeyDer<'static>,
}

impl SelfSigned {
    /// The key, in PEM.
    pub fn key_pem(&self) -> String {
        pem::encode(&pem::Pem::new("PRIVATE KEY", self.key.secret_pkcs8_der()))
    }
}

/// Makes one for a host of these names and addresses.
///
/// # Errors
/// A name that a certificate cannot have, or no random numbers.
pub fn self_signed(names: &[&str]) -> Result<SelfSigned, Error> {
    let random = SystemRandom::new();
    let der = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).map_err(no)?;
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der.as_ref(), &random)
        .map_err(|error: KeyRejected| Error::RingKeyRejected(error.to_string()))?;
    let mut serial = [0; 16];
    random.fill(&mut serial).map_err(no)?;
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let mut params = CertificateParams::new(names)?;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    let certificate = params.self_signed(&Key { pair, random })?;
    Ok(SelfSigned { certificate, key: der.as_ref().to_vec().into() })
}

fn no(_: Unspecified) -> Error {
    Error::RingUnspecified
}

/// What signs. rcgen has one of its own, which brings a parser of certificates along.
struct Key {
    pair: EcdsaKeyPair,
    random: SystemRandom,
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.pair.public_key().as_ref()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        let signature = self.pair.sign(&self.random, message).map_err(no)?;
        Ok(signature.as_ref().to_vec())
    }
}

//! A [`Source`] over a made-up fleet, for tests and benches of the server and the page; and a client of any server.

use std::sync::{Arc, Mutex, MutexGuard};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tessera_system::locks::lock;
use tessera_view::advice::{Recommendations, Scope, Waste};
use tessera_view::explain::{Explanation, Explanations, Story};
use tessera_view::fixtures::MadeUp;
use tessera_view::fleet::Fleet;
use tessera_view::status::Holder;
use tessera_view::tenant::Tenant;
use tessera_view::trace::Trace;
use tessera_view::{API_VERSION, SourceError, history};

use crate::source::{Answer, Source};

/// A made-up fleet that is served.
#[derive(Clone, Debug)]
pub struct Fixture(Arc<Mutex<MadeUp>>);

impl Fixture {
    /// Time stands still until somebody moves it.
    pub fn new(made: MadeUp) -> Self {
        Fixture(Arc::new(Mutex::new(made)))
    }

    /// The fleet, to look at or to change.
    pub fn made(&self) -> MutexGuard<'_, MadeUp> {
        lock(&self.0)
    }

    fn tenant(&self, node: &str, subject: &str) -> Option<Tenant> {
        let fleet = self.made().fleet();
        let mut nodes =
            fleet.nodes.into_iter().filter(|entry| node.is_empty() || entry.node == node);
        nodes.find_map(|entry| {
            entry.view?.tenants.into_iter().find(|tenant| {
                let full = format!("{}/{}", tenant.namespace, tenant.pod);
                full == subject || tenant.pod == subject || tenant.id == subject
            })
        })
    }
}

fn now<T: Send + 'static>(answer: Result<T, SourceError>) -> Answer<'static, T> {
    Box::pin(std::future::ready(answer))
}

impl Source for Fixture {
    fn fleet(&self) -> Answer<'_, Fleet> {
        now(Ok(self.made().fleet()))
    }

    fn history<'a>(&'a self, node: &'a str, query: history::Query) -> Answer<'a, history::Answer> {
        let answer = self.made().history(node, &query);
        now(answer.ok_or_else(|| SourceError::NotFound(format!("no node is called {node}"))))
    }

    fn explain<'a>(&'a self, node: &'a str, subject: &'a str) -> Answer<'a, Explanations> {
        let found = self.tenant(node, subject);
        let found = found.map(|tenant| Explanations::of(vec![(String::new(), explain(&tenant))]));
        now(found.ok_or_else(|| SourceError::NotFound(format!("no pod is called {subject}"))))
    }

    fn recommend(&self, scope: Scope) -> Answer<'_, Recommendations> {
        now(Ok(self.made().recommendations(&scope.namespace, &scope.pod)))
    }

    fn waste(&self, scope: Scope) -> Answer<'_, Waste> {
        now(Ok(self.made().waste(&scope.namespace)))
    }

    fn trace<'a>(&'a self, node: &'a str, seconds: u32) -> Answer<'a, Trace> {
        let trace = self.made().trace(node, seconds);
        now(trace.ok_or_else(|| SourceError::NotFound(format!("no node is called {node}"))))
    }
}

/// Some of what `tessera explain` has.
fn explain(tenant: &Tenant) -> Explanation {
    let holder = Holder {
        namespace: tenant.namespace.clone(),
        pod: tenant.pod.clone(),
        container: tenant.container.clone(),
    };
    let story = Story {
        id: tenant.id.clone(),
        generation: tenant.generation,
        holder: Some(holder),
        ..Story::default()
    };
    Explanation {
        api_version: API_VERSION.to_owned(),
        allocations: vec![story],
        ..Explanation::default()
    }
}

/// A client that does not look at the certificate, as the API server's proxy speaks to pods.
pub fn unverified() -> Arc<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(Anybody(Arc::clone(&provider)));
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    // Ring has the default versions.
    let builder = builder.expect("TLS 1.2 and 1.3");
    Arc::new(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
}

/// Takes any certificate whose key the other side has.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

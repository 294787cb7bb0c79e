//! A certificate for which nobody vouches, made at the start.

use rcgen::{
    Certificate, CertificateParams, Error, PKCS_ECDSA_P256_SHA256, PublicKeyData, SerialNumber,
    SignatureAlgorithm, SigningKey,
};
use ring::error::{KeyRejected, Unspecified};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;

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

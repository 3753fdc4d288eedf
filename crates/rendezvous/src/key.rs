//! Keys with which ranks prove to each other that they know the run's secret.
//!
//! Input: the secret of an attempt. Output: proofs, and whether a proof is true. A key never leaves its process, and neither
//! does the secret. This file does not know who proves what to whom.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::RendezvousError;
use crate::rendezvous::{next_secret, random_bytes};

/// Bytes of a proof: an HMAC-SHA-256.
pub(crate) const PROOF_BYTES: usize = 32;
/// Bytes of a random number that is used once.
pub(crate) const NONCE_BYTES: usize = 32;

/// Such a number.
pub(crate) type Nonce = [u8; NONCE_BYTES];

/// The key of an attempt of a run, made of its secret. Ranks prove to each other that they have it, and never send it.
#[derive(Clone)]
pub struct RunKey(Hmac<Sha256>);

impl RunKey {
    /// The key of the attempt with this secret.
    pub fn of_secret(secret: &str) -> Self {
        Self::derived(secret.as_bytes(), b"paceline: the key of an attempt")
    }

    /// The keys of the attempt with this secret, and of the attempts after it: `count` in all.
    pub(crate) fn of_attempts(secret: &str, count: usize) -> Vec<Self> {
        let secrets =
            std::iter::successors(Some(secret.to_owned()), |secret| Some(next_secret(secret)));
        secrets.take(count).map(|secret| Self::of_secret(&secret)).collect()
    }

    /// The key for one listener of this attempt, which everybody may know by its `name`.
    pub(crate) fn of_listener(&self, name: &str) -> Self {
        let derived = self.prove(&[b"paceline: the key of a listener", name.as_bytes()]);
        Self::derived(&derived, b"paceline: proofs to a listener")
    }

    fn derived(key: &[u8], purpose: &[u8]) -> Self {
        Self(with_key(&with_key(key).chain_update(purpose).finalize().into_bytes()))
    }

    /// A proof that its maker has this key, for these words. All words but one have a fixed length.
    pub(crate) fn prove(&self, words: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.mac(words).finalize().into_bytes().into()
    }

    /// Whether somebody who has this key has proven these words. The time taken reveals nothing about the key.
    pub(crate) fn verify(&self, words: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(words).verify_slice(proof).is_ok()
    }

    fn mac(&self, words: &[&[u8]]) -> Hmac<Sha256> {
        words.iter().fold(self.0.clone(), |mac, word| mac.chain_update(word))
    }
}

/// The key of a run without a secret.
impl Default for RunKey {
    fn default() -> Self {
        Self::of_secret("")
    }
}

/// Leaves out the key, which must not appear in a log.
impl std::fmt::Debug for RunKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunKey").finish_non_exhaustive()
    }
}

fn with_key(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// A new random number. Errors if the kernel gives no number.
pub(crate) fn fresh_nonce() -> Result<Nonce, RendezvousError> {
    random_bytes()
}

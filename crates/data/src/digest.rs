//! The digest of what a data set holds, so that a run knows the data that it began with, wherever the files lie.
//!
//! Input: bytes and numbers, in the order in which the data set holds them. Output: a SHA-256 in hexadecimal. This file
//! knows nothing of data sets.

use sha2::{Digest, Sha256};

/// Numbers that are turned into bytes at once.
const CHUNK_ELEMS: usize = 4096;

/// The SHA-256 of the contents added so far.
#[derive(Debug, Default)]
pub(crate) struct ContentDigest(Sha256);

impl ContentDigest {
    /// Adds bytes, and how many there are, so that neighbors cannot be taken for each other.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// Adds numbers, as their little-endian bytes, and how many there are.
    pub fn numbers<T: Copy, const N: usize>(
        mut self,
        numbers: &[T],
        bytes: fn(T) -> [u8; N],
    ) -> Self {
        self.0.update((numbers.len() as u64).to_le_bytes());
        let mut chunk = Vec::with_capacity(CHUNK_ELEMS * N);
        for part in numbers.chunks(CHUNK_ELEMS) {
            chunk.clear();
            part.iter().for_each(|number| chunk.extend(bytes(*number)));
            self.0.update(&chunk);
        }
        self
    }

    /// The digest as bytes.
    pub fn hash(self) -> [u8; 32] {
        self.0.finalize().into()
    }

    /// The digest.
    pub fn finish(self) -> String {
        self.hash().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digest_of_their_bytes() {
        let numbers: Vec<u32> = (0..10_000).map(|n| n * 70_000).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        let mut hash = Sha256::new();
        hash.update(10_000u64.to_le_bytes());
        hash.update(&bytes);
        let expected: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(ContentDigest::default().numbers(&numbers, u32::to_le_bytes).finish(), expected);
        let one = ContentDigest::default().bytes(b"ab").bytes(b"c").finish();
        assert_ne!(one, ContentDigest::default().bytes(b"a").bytes(b"bc").finish());
    }
}

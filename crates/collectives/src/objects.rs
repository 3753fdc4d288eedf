//! Exchanges serializable objects of any size between ranks that need not know the sizes.
//!
//! Input: an object. Output: the objects of other ranks. This module knows nothing of transports.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{CollectiveError, Group, Result};

fn wrap(error: postcard::Error) -> CollectiveError {
    CollectiveError::Object(error.to_string())
}

impl Group {
    /// Brings one object of each rank to the root, in rank order. Objects may differ in size. Ranks other
    /// than the root get `None`.
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>> {
        let bytes = postcard::to_stdvec(object).map_err(wrap)?;
        let (lengths, all) = self.lengths(bytes.len())?;
        let is_root = self.rank() == root;
        let mut gathered = room(if is_root { all } else { 0 })?;
        self.gather_slice(&bytes, &mut gathered, root)?;
        if is_root { parse(&gathered, &lengths).map(Some) } else { Ok(None) }
    }

    /// Gives every rank one object of each rank, in rank order; objects may differ in size.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        let bytes = postcard::to_stdvec(object).map_err(wrap)?;
        let (lengths, all) = self.lengths(bytes.len())?;
        let mut gathered = room(all)?;
        self.all_gather_slice(&bytes, &mut gathered)?;
        parse(&gathered, &lengths)
    }

    /// Gives every rank the root's object. Other ranks may pass `None`; what they pass is ignored.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<&T>,
        root: usize,
    ) -> Result<T> {
        let is_root = self.rank() == root;
        // A root without an object sends no bytes, so that the others do not wait.
        let object =
            object.filter(|_| is_root).map(postcard::to_stdvec).transpose().map_err(wrap)?;
        let mut bytes = object.unwrap_or_default();
        let mut length = [bytes.len() as u64 as i64];
        self.broadcast_slice(&mut length, root)?;
        if !is_root {
            bytes = room(usize::try_from(length[0]).unwrap_or(usize::MAX))?;
        }
        self.broadcast_slice(&mut bytes, root)?;
        postcard::from_bytes(&bytes).map_err(wrap)
    }

    /// The number of bytes of each rank's object, and of all objects together. All ranks fail together if there is no such
    /// number.
    fn lengths(&self, own: usize) -> Result<(Vec<usize>, usize)> {
        let mut lengths = vec![0i64; self.world_size()];
        self.all_gather_slice(&[own as i64], &mut lengths)?;
        let lengths: Option<Vec<usize>> =
            lengths.iter().map(|&length| usize::try_from(length).ok()).collect();
        let all =
            |lengths: &Vec<usize>| lengths.iter().try_fold(0, |a: usize, &b| a.checked_add(b));
        let found = lengths.and_then(|lengths| all(&lengths).map(|all| (lengths, all)));
        found.ok_or_else(|| {
            CollectiveError::Object("its length does not fit into this machine's memory".into())
        })
    }
}

/// Memory for objects of other ranks. A length that a rank with corrupted memory has sent is an error, and ends no process.
fn room(len_bytes: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let refused = |_| CollectiveError::Object(format!("no memory for {len_bytes} bytes"));
    bytes.try_reserve_exact(len_bytes).map_err(refused)?;
    bytes.resize(len_bytes, 0);
    Ok(bytes)
}

fn parse<T: DeserializeOwned>(bytes: &[u8], lengths: &[usize]) -> Result<Vec<T>> {
    let mut rest = bytes;
    let parts = lengths.iter().map(|&length| {
        let (part, after) = rest.split_at(length);
        rest = after;
        postcard::from_bytes(part).map_err(wrap)
    });
    parts.collect()
}

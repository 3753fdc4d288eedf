//! Exchanges serializable objects of any size between ranks that need not know the sizes.
//!
//! Input: an object. Output: the objects of other ranks. This module knows nothing of transports.

use paceline_memory::{Category, DType, Tensor};
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
        let gathered = if self.rank() == root { Some(self.bytes(all)?) } else { None };
        self.gather(&self.copy_of(&bytes)?, gathered.as_ref(), root)?;
        gathered.map(|gathered| parse(&gathered.read()?, &lengths)).transpose()
    }

    /// Gives every rank one object of each rank, in rank order; objects may differ in size.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        let bytes = postcard::to_stdvec(object).map_err(wrap)?;
        let (lengths, all) = self.lengths(bytes.len())?;
        let gathered = self.bytes(all)?;
        self.all_gather(&self.copy_of(&bytes)?, &gathered)?;
        parse(&gathered.read()?, &lengths)
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
        let bytes = object.unwrap_or_default();
        let mut length = [bytes.len() as u64 as i64];
        self.broadcast_slice(&mut length, root)?;
        let data = if is_root {
            self.copy_of(&bytes)?
        } else {
            self.bytes(usize::try_from(length[0]).unwrap_or(usize::MAX))?
        };
        self.broadcast(&data, root)?;
        postcard::from_bytes(&data.read::<u8>()?).map_err(wrap)
    }

    /// Memory for objects of other ranks. A length that a rank with corrupted memory has sent is an error, and ends no
    /// process.
    fn bytes(&self, len: usize) -> Result<Tensor> {
        Ok(self.memory().tensor(DType::U8, [len], Category::Communication)?)
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

fn parse<T: DeserializeOwned>(bytes: &[u8], lengths: &[usize]) -> Result<Vec<T>> {
    let mut rest = bytes;
    let parts = lengths.iter().map(|&length| {
        let (part, after) = rest.split_at(length);
        rest = after;
        postcard::from_bytes(part).map_err(wrap)
    });
    parts.collect()
}

//! Which launcher has started a rank.
//!
//! Where a run has several hosts, each has a launcher. If somebody starts the launcher of a host twice, some ranks of the one
//! and some of the other could come first, and then neither run would be whole. So the ranks of a host are welcome only
//! if all of them have the same launcher as the first of them that came.

use sha2::{Digest, Sha256};

/// Bytes of a launcher's number.
pub(crate) const LAUNCH_BYTES: usize = 16;

/// A launcher, which has started the ranks of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LauncherId {
    /// The number of the host.
    pub(crate) host: u32,
    /// Differs from those of other launchers.
    pub(crate) number: [u8; LAUNCH_BYTES],
}

impl LauncherId {
    /// The launcher of this name, on the host of this number.
    pub(crate) fn named(name: &str, host: usize) -> Option<Self> {
        let digest = Sha256::digest(name.as_bytes());
        // The largest number stands for no host.
        let host = u32::try_from(host).ok().filter(|&host| host < u32::MAX)?;
        Some(Self { host, number: std::array::from_fn(|at| digest[at]) })
    }
}

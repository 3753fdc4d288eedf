//! Data sets that are published as files with checksums.

/// A data set as it is published.
#[derive(Debug)]
pub struct Source {
    /// The URL of the folder that has its files.
    pub address: &'static str,
    /// A folder inside the data folder, where files may be too, and where archives are unpacked.
    pub subfolder: &'static str,
    /// Its files.
    pub items: &'static [Item],
}

/// A file that can be fetched.
#[derive(Debug)]
pub struct Item {
    /// Its name.
    pub name: &'static str,
    /// Its published checksum.
    pub md5: &'static str,
    /// More bytes than it has. The download of a longer file ends early.
    pub max_bytes: u64,
    /// The files of an archive, in the subfolder; otherwise empty.
    pub members: &'static [&'static str],
}

impl Item {
    #[cfg(feature = "network")]
    pub(crate) fn is_archive(&self) -> bool {
        !self.members.is_empty()
    }
}

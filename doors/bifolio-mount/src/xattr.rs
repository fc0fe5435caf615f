//! Extended attributes: those of the source directory, answered as C programs ask for them.
//!
//! A program asks twice: with size 0 for the length, then with a buffer of that length. A buffer
//! that is too short is refused with `ERANGE`. The kernel checks who may read or change an
//! attribute, but passes on the list as it is, so names in the namespace `trusted` are removed here
//! from the lists of programs without privileges.

use std::ffi::OsStr;

use fuser::INodeNo;
use rustix::fs::{
    XattrFlags, getxattr, getxattr_query, listxattr, listxattr_query, removexattr, setxattr,
};
use rustix::io::Errno;

use crate::error::Result;
use crate::volume::Volume;

/// Capabilities of the program in a file. A change of the contents removes them.
pub const CAPABILITY: &str = "security.capability";
/// Access control list that a directory gives to what is created in it.
pub const DEFAULT_ACL: &str = "system.posix_acl_default";
/// Prefix of names that only root sees.
const TRUSTED: &[u8] = b"trusted.";

/// Answer to a question for a value or for names.
#[derive(Debug, PartialEq)]
pub enum Answer {
    /// The length that the program's buffer needs.
    Length(usize),
    Bytes(Vec<u8>),
}

impl Volume {
    pub fn set_xattr(&self, number: INodeNo, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        let inode = self.table.get(number)?;
        let flags = XattrFlags::from_bits_retain(flags as u32);
        if name == CAPABILITY {
            // The write-out of earlier writes would remove them.
            inode.write_pages()?;
        }
        inode.with_path(|path| setxattr(path, name, value, flags))?;
        let mut data = inode.data();
        data.has_no_capability &= name != CAPABILITY;
        data.touch();
        Ok(())
    }

    /// Returns the value, or its length if `size` is 0.
    pub fn xattr(&self, number: INodeNo, name: &OsStr, size: u32) -> Result<Answer> {
        let inode = self.table.get(number)?;
        // The kernel asks before the first write to a file.
        if name == CAPABILITY && inode.try_data().is_some_and(|data| data.has_no_capability) {
            return Err(Errno::NODATA.into());
        }
        if size == 0 {
            return Ok(Answer::Length(inode.with_path(|path| getxattr_query(path, name))?));
        }
        let mut value = vec![0; size as usize];
        let length = inode.with_path(|path| getxattr(path, name, &mut value[..]))?;
        value.truncate(length);
        Ok(Answer::Bytes(value))
    }

    /// Returns the names, or their length if `size` is 0.
    pub fn xattrs(&self, number: INodeNo, size: u32, is_by_root: bool) -> Result<Answer> {
        let names = self.table.get(number)?.with_path(|path| {
            loop {
                let mut names = vec![0; listxattr_query(path)?];
                match listxattr(path, &mut names[..]) {
                    // Another program has added some.
                    Err(Errno::RANGE) => {}
                    length => {
                        names.truncate(length?);
                        return Ok(names);
                    }
                }
            }
        })?;
        let names = if is_by_root { names } else { without_trusted(&names) };
        match size as usize {
            0 => Ok(Answer::Length(names.len())),
            size if size < names.len() => Err(Errno::RANGE.into()),
            _ => Ok(Answer::Bytes(names)),
        }
    }

    pub fn remove_xattr(&self, number: INodeNo, name: &OsStr) -> Result<()> {
        let inode = self.table.get(number)?;
        inode.with_path(|path| removexattr(path, name))?;
        inode.data().touch();
        Ok(())
    }
}

/// Returns a list of names, each with a zero byte at its end, without those of `trusted`.
fn without_trusted(names: &[u8]) -> Vec<u8> {
    let each = names.split_inclusive(|byte| *byte == 0);
    each.filter(|name| !name.starts_with(TRUSTED)).flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusted_names_are_removed_from_a_list() {
        let names = b"trusted.a\0user.trusted.b\0trusted.c\0security.d\0";
        assert_eq!(without_trusted(names), b"user.trusted.b\0security.d\0");
    }
}

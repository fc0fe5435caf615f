//! Bytes moved to and from devices: for this process, and for the kernel's swap.

use std::fs;
use std::ops::Sub;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Bytes moved so far, or between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceBytes {
    pub(crate) read: u64,
    pub(crate) written: u64,
}

impl DeviceBytes {
    /// Returns the bytes that this process has read, and has written past the page cache or dirtied
    /// in it.
    pub(crate) fn of_this_process() -> Result<Self> {
        let text = text("/proc/self/io")?;
        Ok(Self { read: field(&text, "read_bytes:")?, written: field(&text, "write_bytes:")? })
    }

    /// Returns the bytes that the kernel has swapped, on the whole machine.
    pub(crate) fn of_swap() -> Result<Self> {
        let text = text("/proc/vmstat")?;
        let page_bytes = rustix::param::page_size() as u64;
        Ok(Self {
            read: field(&text, "pswpin")? * page_bytes,
            written: field(&text, "pswpout")? * page_bytes,
        })
    }
}

impl Sub for DeviceBytes {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            read: self.read.saturating_sub(before.read),
            written: self.written.saturating_sub(before.written),
        }
    }
}

pub(super) fn text(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(Error::system(format!("read {path}")))
}

/// The value of a `name value` line.
pub(super) fn field(text: &str, name: &str) -> Result<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
        .ok_or_else(|| Error::Refused(format!("the kernel does not count `{name}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "cancelled_write_bytes: 3\nwrite_bytes: 5\nread_bytes: 7\n";
        assert_eq!(field(text, "write_bytes:").unwrap(), 5);
        assert_eq!(field(text, "read_bytes:").unwrap(), 7);
        assert!(field("pswpinx 4\n", "pswpin").is_err());
    }
}

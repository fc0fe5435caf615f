//! The resident size of this process, as the kernel reports it.

use std::fs;

use crate::error::{Error, Result};
use crate::host::kibibytes_field;

/// The largest resident size this process ever had.
pub(crate) fn peak_bytes() -> Result<u64> {
    field("VmHWM")
}

/// The resident size this process has.
pub(crate) fn bytes() -> Result<u64> {
    field("VmRSS")
}

fn field(name: &str) -> Result<u64> {
    let status =
        fs::read_to_string("/proc/self/status").map_err(Error::system("read /proc/self/status"))?;
    kibibytes_field(&status, name)
        .ok_or_else(|| Error::Refused(format!("the kernel reports no {name} of this process")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_stays_after_the_memory_is_gone() {
        let before = peak_bytes().unwrap();
        let bytes = vec![1u8; 64 << 20];
        std::hint::black_box(&bytes);
        drop(bytes);
        let peak_bytes = peak_bytes().unwrap();
        assert!(peak_bytes >= before.max(64 << 20));
        assert!(peak_bytes >= super::bytes().unwrap() + (32 << 20));
    }
}

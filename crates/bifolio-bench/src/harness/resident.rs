//! The resident size of this process, as the kernel reports it.

use std::fs;

use crate::error::{Error, Result};
use crate::host::kibibytes_field;

/// The largest resident size this process ever had (`VmHWM`).
pub(crate) fn peak_bytes() -> Result<u64> {
    let status =
        fs::read_to_string("/proc/self/status").map_err(Error::system("read /proc/self/status"))?;
    kibibytes_field(&status, "VmHWM")
        .ok_or_else(|| Error::Refused("the kernel reports no peak resident size".into()))
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
        assert!(peak_bytes().unwrap() >= before.max(64 << 20));
    }
}

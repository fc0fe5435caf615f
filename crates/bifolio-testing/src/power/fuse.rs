//! A file system of FUSE whose root is one file: the device. Speaks the kernel's protocol
//! (`linux/fuse.h`), as far as a loop device uses it.

use std::fs::File;
use std::io::{self, Read, Write};

use super::device::Device;

/// Numbers of requests.
mod request {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
}

const HEAD_BYTES: usize = 40;
/// Bytes of the arguments of a read and of a write.
const TRANSFER_BYTES: usize = 40;
const WRITE_MAX_BYTES: u32 = 128 << 10;
/// Version of the protocol.
const VERSION: [u32; 2] = [7, 31];
/// Writes of more than a page; `max_pages` is meant.
const FLAGS: u32 = 1 << 5 | 1 << 22;
/// An open file: its reads and writes are those of the device, without the kernel's page cache.
const DIRECT_IO: u32 = 1;

/// Serves requests until the mount is gone.
pub(super) fn serve(mut fuse: File, device: &Device) {
    let mut buffer = vec![0; HEAD_BYTES + TRANSFER_BYTES + WRITE_MAX_BYTES as usize + (64 << 10)];
    loop {
        let length = match fuse.read(&mut buffer) {
            Ok(length) if length >= HEAD_BYTES => length,
            // An interrupted request is gone before it was read.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => {
                continue;
            }
            _ => return,
        };
        let (head, body) = buffer[..length].split_at(HEAD_BYTES);
        let (number, unique) = (u32_at(head, 4), u64_at(head, 8));
        use request::{BATCH_FORGET, FORGET, INTERRUPT};
        if matches!(number, FORGET | BATCH_FORGET | INTERRUPT) {
            continue;
        }
        let (code, answer) = match answer(number, body, device) {
            Ok(answer) => (0, answer),
            Err(error) => (-error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
        };
        let mut out = ((16 + answer.len()) as u32).to_le_bytes().to_vec();
        out.extend(code.to_le_bytes());
        out.extend(unique.to_le_bytes());
        out.extend(answer);
        // Fails if the request was interrupted, or the mount is gone: the next read tells.
        let _ = fuse.write(&out);
    }
}

fn answer(number: u32, body: &[u8], device: &Device) -> io::Result<Vec<u8>> {
    let transfer = || (u64_at(body, 8) as usize, u32_at(body, 16) as usize);
    match number {
        request::INIT => Ok(init(u32_at(body, 8))),
        request::GETATTR | request::SETATTR => Ok(attributes(device.len() as u64)),
        request::OPEN => Ok(words(&[0, 0, DIRECT_IO, 0])),
        request::READ => {
            let (position, length) = transfer();
            Ok(device.read(position, length))
        }
        request::WRITE => {
            let (position, length) = transfer();
            device.write(position, &body[TRANSFER_BYTES..][..length])?;
            Ok(words(&[length as u32, 0]))
        }
        request::FSYNC => device.flush().map(|()| Vec::new()),
        request::STATFS => Ok(vec![0; 80]),
        request::RELEASE | request::FLUSH | request::DESTROY => Ok(Vec::new()),
        _ => Err(io::Error::from_raw_os_error(libc::ENOSYS)),
    }
}

fn init(readahead_max: u32) -> Vec<u8> {
    let (background, pages) = (64 | 48 << 16, WRITE_MAX_BYTES / 4096);
    let mut out = words(&[VERSION[0], VERSION[1], readahead_max, FLAGS, background]);
    out.extend(words(&[WRITE_MAX_BYTES, 1, pages]));
    out.resize(64, 0);
    out
}

/// Returns attributes that stay valid for an hour: a regular file.
fn attributes(length: u64) -> Vec<u8> {
    let mut out = words(&[3600, 0, 0, 0]);
    for word in [1, length, length / 512, 0, 0, 0] {
        out.extend(u64::to_le_bytes(word));
    }
    let mode = libc::S_IFREG | 0o600;
    // Nanoseconds, mode, links, owner, group, device, block size, flags.
    out.extend(words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]));
    out
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

//! Messages of the socket: a few words and a text, with up to two descriptors.
//!
//! The socket keeps messages apart (`SOCK_SEQPACKET`). It carries what happens once for each client
//! or file; requests for bytes are in memory (`ring.rs`).
//!
//! ```text
//!   owner   HELLO version, frames offset, frames bytes; memory, ring      once, or FAILED
//!   client  OPEN flags; the file           owner  OPENED file, offsets, Entries; or FAILED
//!   client  CLOSE file                     owner  CLOSED
//! ```

use crate::error::Failure;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Changes with every change of the messages, of the ring, or of what hits read.
pub(crate) const VERSION: u64 = 1;

pub(crate) const HELLO: u64 = 1;
pub(crate) const FAILED: u64 = 2;
pub(crate) const OPEN: u64 = 3;
pub(crate) const OPENED: u64 = 4;
pub(crate) const CLOSE: u64 = 5;
pub(crate) const CLOSED: u64 = 6;

/// Bits of the first word of [`OPEN`].
pub(crate) const OPEN_READ: u64 = 1;
pub(crate) const OPEN_WRITE: u64 = 2;

const WORDS: usize = 5;
const HEADER_BYTES: usize = (WORDS + 1) * size_of::<u64>();
const TEXT_BYTES_MAX: usize = 2048;
const DESCRIPTORS_MAX: usize = 2;

/// A message without its descriptors.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: u64,
    pub(crate) words: [u64; WORDS],
    pub(crate) text: String,
}

impl Message {
    pub(crate) fn new(kind: u64, words: &[u64]) -> Self {
        let mut message = Self { kind, ..Self::default() };
        message.words[..words.len()].copy_from_slice(words);
        message
    }

    pub(crate) fn failed(failure: &Failure) -> Self {
        let words = [failure.code, failure.errno];
        Self { text: failure.text.clone(), ..Self::new(FAILED, &words) }
    }

    /// Returns the failure that a message of the kind [`FAILED`] is.
    pub(crate) fn into_failure(self) -> Failure {
        Failure { code: self.words[0], errno: self.words[1], text: self.text }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.kind.to_le_bytes().to_vec();
        bytes.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        // A character that is cut arrives as another.
        bytes.extend(self.text.bytes().take(TEXT_BYTES_MAX));
        bytes
    }

    /// Returns `None` for bytes that are no message.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (header, text) = bytes.split_at_checked(HEADER_BYTES)?;
        let (words, _) = header.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let kind = words.next()?;
        let mut message =
            Self { kind, text: String::from_utf8_lossy(text).into_owned(), ..Self::default() };
        message.words.iter_mut().zip(words).for_each(|(word, found)| *word = found);
        Some(message)
    }
}

/// Sends a message. Fails, without a signal, if the other side is gone.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = message.encode();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        debug_assert!(fits, "{} descriptors", descriptors.len());
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            answer => return answer.map(drop).map_err(io::Error::from),
        }
    }
}

/// Receives a message and its descriptors; blocks. Returns `None` at the end of the connection.
///
/// # Errors
/// Bytes that are no message; more descriptors than a message has.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let mut bytes = [0; HEADER_BYTES + TEXT_BYTES_MAX];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let received = loop {
        let target = &mut [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, target, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            answer => break answer?,
        }
    };
    // Also of a message that is refused: they are closed.
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let is_cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let message = Message::decode(&bytes[..received.bytes]).filter(|_| !is_cut);
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a message of this protocol");
    message.map(|message| Some((message, descriptors))).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn messages_arrive_whole_with_their_descriptors() {
        let (one, other) = pair();
        let long = Message { text: "x".repeat(5000), ..Message::new(OPEN, &[1, 2, u64::MAX]) };
        for message in [Message::new(CLOSE, &[7]), long] {
            send(one.as_fd(), &message, &[one.as_fd(), other.as_fd()]).unwrap();
            let (found, descriptors) = receive(other.as_fd()).unwrap().unwrap();
            assert_eq!((found.kind, found.words), (message.kind, message.words));
            assert_eq!(found.text.len(), message.text.len().min(TEXT_BYTES_MAX));
            assert_eq!(descriptors.len(), 2);
        }
        drop(one);
        assert!(receive(other.as_fd()).unwrap().is_none(), "the end");
        assert!(send(other.as_fd(), &Message::default(), &[]).is_err());
    }

    #[test]
    fn garbage_is_an_error() {
        let (one, other) = pair();
        for garbage in [vec![7; 3], vec![7; HEADER_BYTES - 1], vec![7; 100_000]] {
            rustix::net::send(&one, &garbage, SendFlags::empty()).unwrap();
            assert!(receive(other.as_fd()).is_err(), "{} bytes", garbage.len());
        }
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(9))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let descriptors = [other.as_fd(); 9];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let bytes = [0; HEADER_BYTES];
        sendmsg(&one, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
        assert!(receive(other.as_fd()).is_err(), "too many descriptors");
    }
}

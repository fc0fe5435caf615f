//! The word of a request between two processes: who may touch what is beside it, and who is to be
//! woken.
//!
//! PROTOCOL RING, of one slot. A slot has one thread of the client, and one worker of the owner, by
//! a flag in the owner's own memory. Memory and doorbell are in `bifolio-share: ring.rs`.
//!
//! ```text
//!  CLIENT                                     OWNER, a worker
//!  C1 write the words, the data               W1 set the flag of the slot; it was set: next slot
//!  C2 swap the state to POSTED (AcqRel);      W2 load the state (Acquire); neither POSTED nor
//!     it was GONE: the owner is gone             WAITED: W6
//!  C3 doorbell + 1 (Release), wake            W3 copy each word once, check it, make the call
//!  C4 exchange POSTED for WAITED; it is       W4 write the words of the answer, the data
//!     DONE: C6                                W5 exchange POSTED or WAITED for DONE (Release);
//!  C5 sleep while it is WAITED                   it was WAITED: wake
//!  C6 read the answer (Acquire of C4)         W6 clear the flag (Release)
//!  C7 give the slot back                      W7 look at all slots again, before a sleep while the
//!                                                doorbell is as it was before the look
//! ```
//!
//! - A request that is posted between W5 and W6 is not seen by other workers, which the flag keeps
//!   away; W7 sees it.
//! - A request that is posted after W7 has passed its slot has changed the doorbell (C2 is before
//!   C3), so the worker does not sleep.
//! - The owner's end: the client's watcher turns hits off, then stores GONE in all slots and wakes.
//!   C2 comes before that store, and C4 sees it, or after, and sees it itself. W5 leaves it.
//!
//! Covered by `loom_request`. Each change of the word is a method:
//!
//! ```text
//!   FREE ----post----> POSTED ----answer----> DONE ----release----> FREE
//!                        |                     ^
//!                        '--wait--> WAITED ----'  answer says: wake
//!   any ----give_up----> GONE  and no client's change leaves it
//! ```
//!
//! The client owns the words of the request while the word is FREE or DONE, the owner while it is
//! POSTED or WAITED. A client that lies stores any value at any moment: the owner then answers a
//! request that is not there, or none, and never waits.

use crate::sync::{AtomicU32, Ordering};

const FREE: u32 = 0;
const POSTED: u32 = 1;
const WAITED: u32 = 2;
const DONE: u32 = 3;
const GONE: u32 = 4;

/// Error of a client's change: the owner of the cache is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// State of a wait for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The answer is there.
    Done,
    /// The client sleeps as long as the word has this value, and asks again.
    While(u32),
}

/// The word of a request.
#[derive(Clone, Copy, Debug)]
pub struct SlotWord<'a>(pub &'a AtomicU32);

impl SlotWord<'_> {
    /// Posts the request whose words the client has written (RING-C2).
    ///
    /// # Errors
    /// The owner is gone.
    pub fn post(self) -> Result<(), Gone> {
        // AcqRel: the Release pairs with the Acquire in `is_posted`: the words are those of the
        // request. The Acquire pairs with the Release in `give_up`, as below.
        if self.0.swap(POSTED, Ordering::AcqRel) != GONE {
            return Ok(());
        }
        // Other threads of the client see it, too.
        self.give_up();
        Err(Gone)
    }

    /// Returns `true` if there is a request to answer (RING-W2).
    pub fn is_posted(self) -> bool {
        // Acquire: pairs with the Release in `post`.
        matches!(self.0.load(Ordering::Acquire), POSTED | WAITED)
    }

    /// Makes the answer, whose words the owner has written, visible (RING-W5). Returns `true` if
    /// the client is to be woken. A client that has given up is not answered: its next request
    /// would not see that the connection has ended.
    #[must_use]
    pub fn answer(self) -> bool {
        // Release: pairs with the Acquire in `wait`: the answer is complete. On failure, Relaxed:
        // nothing is read.
        let exchange = (Ordering::Release, Ordering::Relaxed);
        match self.0.compare_exchange(POSTED, DONE, exchange.0, exchange.1) {
            Err(WAITED) => self.0.compare_exchange(WAITED, DONE, exchange.0, exchange.1).is_ok(),
            _ => false,
        }
    }

    /// Announces a wait, unless the answer is there (RING-C4).
    ///
    /// # Errors
    /// The owner is gone.
    pub fn wait(self) -> Result<Wait, Gone> {
        // Acquire: pairs with the Release in `answer`: the answer is complete.
        let exchange = (Ordering::Acquire, Ordering::Acquire);
        match self.0.compare_exchange(POSTED, WAITED, exchange.0, exchange.1) {
            Ok(_) | Err(WAITED) => Ok(Wait::While(WAITED)),
            Err(DONE) => Ok(Wait::Done),
            Err(_) => Err(Gone),
        }
    }

    /// Ends a request whose answer was read (RING-C7). What `give_up` has stored stays.
    pub fn release(self) {
        // Relaxed: the next request is ordered by what gives the slot to its thread.
        let _ = self.0.compare_exchange(DONE, FREE, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Lets the request fail, and all that follow. The caller wakes all that sleep.
    pub fn give_up(self) {
        // Release: pairs with the Acquire in `post` and `wait`: what the caller did before, such as
        // turning hits off, is seen. A swap, because loom loses a plain store that races with one.
        self.0.swap(GONE, Ordering::Release);
    }
}

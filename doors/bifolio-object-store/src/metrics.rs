//! Counts of a store: requests, bytes, hits by tier, waits.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! metrics {
    ($($(#[doc = $doc:literal])+ $field:ident,)+) => {
        /// A snapshot of a store's counts, since it was built.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Metrics {
            $($(#[doc = $doc])+ pub $field: u64,)+
        }

        /// The counts.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $field: AtomicU64,)+
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Metrics {
                // Relaxed: only the values count.
                Metrics { $($field: self.$field.load(Ordering::Relaxed),)+ }
            }
        }

        impl Metrics {
            /// Returns what was counted after `earlier`, a snapshot of the same store; 0 for
            /// counts that are lower than in it.
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($field: self.$field.saturating_sub(earlier.$field),)+ }
            }

            /// Returns the counts with their names.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field),)+]
            }
        }
    };
}

metrics! {
    /// Requests for bytes sent to the store.
    get_requests,
    /// Requests for the metadata of one object sent to the store.
    head_requests,
    /// Lists sent to the store.
    list_requests,
    /// Bytes received from the store.
    received_bytes,
    /// Bytes returned to callers.
    returned_bytes,
    /// Reads of a part that found its bytes in memory. Bytes that are kept and others count each,
    /// here and below.
    memory_hits,
    /// Reads of a part that read it from the disk tier.
    disk_hits,
    /// Bytes of parts whose checksums were verified: as a rule once after they came from the disk.
    verified_bytes,
    /// Reads of a part that sent a request for it.
    misses,
    /// Reads of a part that shared the request of another read.
    shared,
    /// Reads that the cache passed on whole, because of their conditions.
    passed_on,
    /// Reads that started again because the object had changed.
    changed,
    /// Time that reads waited for the store, microseconds.
    store_wait_us,
    /// Time that reads waited for the disk tier, microseconds.
    disk_wait_us,
    /// Time that parts of answers waited for room in memory
    /// ([`flight_bytes_max`](crate::CachedStoreBuilder::flight_bytes_max)), microseconds.
    room_wait_us,
    /// Time from the last byte of a part until the part was in the cache, microseconds.
    insert_us,
    /// Requests repeated after a body that was cut, or late.
    retries,
    /// Parts put into the cache.
    inserted,
    /// Parts evicted for others.
    evicted,
    /// Parts that could not be put into the cache, because it was full or busy.
    not_inserted,
    /// Parts of which the disk tier returned other bytes than were written, or none.
    corrupt,
    /// Reads of a part that were sent to the store because the disk tier did not answer in time.
    disk_late,
    /// Writes that the disk refused.
    disk_write_failures,
}

/// Adds to a count.
pub(crate) fn add(counter: &AtomicU64, more: u64) {
    // Relaxed: only the value counts.
    counter.fetch_add(more, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_to_a_later_snapshot_is_zero() {
        let earlier = Metrics { misses: 3, ..Metrics::default() };
        let later = Metrics { misses: 5, disk_hits: 1, ..earlier };
        assert_eq!(
            later.since(&earlier),
            Metrics { misses: 2, disk_hits: 1, ..Default::default() }
        );
        assert_eq!(earlier.since(&later), Metrics::default());
    }
}

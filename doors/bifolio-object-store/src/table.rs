//! The table of parts: which slot each cached part is in, and which parts are being fetched.
//!
//! One lock covers both, so that a part is never fetched twice: it leaves the fetches in the same
//! step in which it appears in a slot. Slots are reused in the order of CLOCK: a slot that was read
//! since the hand passed it last gets a second chance. A new part has none yet, so that a scan does
//! not evict what is read again and again.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use object_store::path::Path;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::object::ObjectId;
use super::object_store;
use super::received::Received;
use super::record::{PartKey, Record};
use super::states::{SlotState, SlotStates};

/// A request on its way. It is aborted when the last reader drops its reference, unless one of them
/// has its bytes and leaves its reference in the table.
#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) task: OnceLock<AbortHandle>,
    /// The last part of the request.
    pub(crate) last: PartKey,
    pub(crate) flight: u64,
}

impl Drop for Fetch {
    fn drop(&mut self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

/// A part that is being fetched or put into its slot.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) number: u64,
    pub(crate) result: watch::Receiver<Received>,
    pub(crate) fetch: Weak<Fetch>,
    /// The request, if a reader has its bytes and others of its parts are still to come.
    pub(crate) kept: Option<Arc<Fetch>>,
}

/// Where a part is.
#[derive(Debug)]
pub(crate) enum Place {
    Absent,
    Slot(Snapshot),
    /// The request is `None` if the part is complete.
    Flight(watch::Receiver<Received>, Option<Arc<Fetch>>),
}

/// What is in a slot.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) slot: u32,
    pub(crate) length_bytes: u32,
    pub(crate) checksums: Arc<[u64]>,
    /// The state of the slot when the part was found in it.
    pub(crate) state: SlotState,
}

#[derive(Debug)]
enum Slot {
    Free,
    /// Being written or erased.
    Busy,
    Ready {
        key: PartKey,
        length_bytes: u32,
        checksums: Arc<[u64]>,
        is_used: bool,
    },
}

/// A slot to write to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) slot: u32,
    /// Length of the part that was evicted from it; 0 if there was none.
    pub(crate) evicted_bytes: u32,
}

/// An object of which parts are cached.
#[derive(Debug)]
struct Cached {
    location: Path,
    parts: u32,
}

/// The table of parts.
#[derive(Debug)]
pub(crate) struct Table {
    places: HashMap<PartKey, u32>,
    /// The objects of the parts in `places`.
    objects: HashMap<ObjectId, Cached>,
    slots: Vec<Slot>,
    states: Arc<SlotStates>,
    slots_max: u32,
    free: Vec<u32>,
    hand: usize,
    flights: HashMap<PartKey, Flight>,
    next_flight: u64,
}

impl Table {
    pub(crate) fn new(slots_max: u32, states: Arc<SlotStates>) -> Self {
        Self {
            places: HashMap::new(),
            objects: HashMap::new(),
            slots: Vec::new(),
            states,
            slots_max,
            free: Vec::new(),
            hand: 0,
            flights: HashMap::new(),
            next_flight: 0,
        }
    }

    /// Returns where a part is, and marks its slot as used.
    pub(crate) fn find(&mut self, key: &PartKey) -> Place {
        if let Some(&slot) = self.places.get(key)
            && let Slot::Ready { length_bytes, checksums, is_used, .. } =
                &mut self.slots[slot as usize]
        {
            *is_used = true;
            let (length_bytes, checksums) = (*length_bytes, Arc::clone(checksums));
            let state = self.states.get(slot);
            return Place::Slot(Snapshot { slot, length_bytes, checksums, state });
        }
        self.find_flight(key)
    }

    /// Returns where a part comes from, if it is not to be read from its slot.
    pub(crate) fn find_flight(&self, key: &PartKey) -> Place {
        let Some(flight) = self.flights.get(key) else { return Place::Absent };
        let is_complete = {
            let received = flight.result.borrow();
            if received.failure().is_some() {
                return Place::Absent;
            }
            received.is_complete()
        };
        match (is_complete, flight.fetch.upgrade()) {
            (true, _) => Place::Flight(flight.result.clone(), None),
            (false, Some(fetch)) => Place::Flight(flight.result.clone(), Some(fetch)),
            // Its last reader is gone.
            (false, None) => Place::Absent,
        }
    }

    /// Returns a number for the flights of one request.
    pub(crate) fn number_flight(&mut self) -> u64 {
        self.next_flight += 1;
        self.next_flight
    }

    pub(crate) fn add_flight(&mut self, key: PartKey, flight: Flight) {
        self.flights.insert(key, flight);
    }

    /// Returns `true` until the flight ends, or its object changes.
    pub(crate) fn has_flight(&self, key: &PartKey, number: u64) -> bool {
        self.flights.get(key).is_some_and(|flight| flight.number == number)
    }

    /// Ends a flight. Returns it, to be dropped without the lock.
    pub(crate) fn end_flight(&mut self, key: &PartKey, number: u64) -> Option<Flight> {
        if self.has_flight(key, number) { self.flights.remove(key) } else { None }
    }

    /// Lets a request go on without readers. Returns the reference if its last part is here.
    pub(crate) fn keep(&mut self, fetch: Arc<Fetch>) -> Option<Arc<Fetch>> {
        match self.flights.get_mut(&fetch.last) {
            Some(flight) if flight.number == fetch.flight => flight.kept.replace(fetch),
            _ => Some(fetch),
        }
    }

    /// Takes the references to requests that go on without readers.
    pub(crate) fn take_kept(&mut self) -> Vec<Arc<Fetch>> {
        self.flights.values_mut().filter_map(|flight| flight.kept.take()).collect()
    }

    /// Returns the parts that come without readers, or are on their way into their slots.
    pub(crate) fn unfinished(&self) -> Vec<watch::Receiver<Received>> {
        let flights = self.flights.values();
        let kept: HashSet<u64> =
            flights.clone().filter(|it| it.kept.is_some()).map(|it| it.number).collect();
        let is_due = |it: &&Flight| kept.contains(&it.number) || it.result.borrow().is_complete();
        flights.filter(is_due).map(|it| it.result.clone()).collect()
    }

    /// Takes a slot for a new part, evicting another one if none is free. Returns `None` if all
    /// slots are being written.
    pub(crate) fn take_slot(&mut self) -> Option<Taken> {
        let taken = self.find_slot()?;
        self.states.change(taken.slot);
        Some(taken)
    }

    fn find_slot(&mut self) -> Option<Taken> {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = Slot::Busy;
            return Some(Taken { slot, evicted_bytes: 0 });
        }
        if (self.slots.len() as u64) < u64::from(self.slots_max) {
            self.slots.push(Slot::Busy);
            return Some(Taken { slot: self.slots.len() as u32 - 1, evicted_bytes: 0 });
        }
        for _ in 0..2 * self.slots.len() {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            match &mut self.slots[slot] {
                Slot::Ready { is_used, .. } if *is_used => *is_used = false,
                Slot::Ready { key, length_bytes, .. } => {
                    let taken = Taken { slot: slot as u32, evicted_bytes: *length_bytes };
                    let key = *key;
                    self.remove_place(&key);
                    self.slots[slot] = Slot::Busy;
                    return Some(taken);
                }
                Slot::Free | Slot::Busy => {}
            }
        }
        None
    }

    /// Makes a part that was written to its slot readable. Returns `true` if it is the first one of
    /// its object.
    pub(crate) fn publish(&mut self, slot: u32, record: Record, location: &Path) -> bool {
        let Record { key, length_bytes, checksums } = record;
        let checksums = checksums.into();
        self.slots[slot as usize] = Slot::Ready { key, length_bytes, checksums, is_used: false };
        if let Some(old) = self.places.insert(key, slot) {
            self.free_slot(old);
            return false;
        }
        let object = self.objects.entry(key.object);
        let object = object.or_insert_with(|| Cached { location: location.clone(), parts: 0 });
        object.parts += 1;
        object.parts == 1
    }

    /// Removes a part from the places. Returns its slot.
    fn remove_place(&mut self, key: &PartKey) -> Option<u32> {
        let slot = self.places.remove(key)?;
        if let Entry::Occupied(mut object) = self.objects.entry(key.object) {
            object.get_mut().parts -= 1;
            if object.get().parts == 0 {
                object.remove();
            }
        }
        Some(slot)
    }

    /// Returns the objects of which parts are cached.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (ObjectId, &Path)> {
        self.objects.iter().map(|(id, object)| (*id, &object.location))
    }

    /// Adds a slot with what a record says about it, at start. A part without a name is not
    /// restored.
    pub(crate) fn restore(&mut self, record: Option<Record>, names: &HashMap<ObjectId, Path>) {
        let slot = self.slots.len() as u32;
        self.slots.push(Slot::Busy);
        let location = record.as_ref().and_then(|record| names.get(&record.key.object));
        match (record, location) {
            (Some(record), Some(location)) => {
                self.publish(slot, record, location);
            }
            _ => self.free_slot(slot),
        }
    }

    pub(crate) fn free_slot(&mut self, slot: u32) {
        self.slots[slot as usize] = Slot::Free;
        self.free.push(slot);
    }

    /// Removes a part whose bytes were found to be wrong. Returns `false` if it has left the slot
    /// since.
    pub(crate) fn remove_wrong(&mut self, key: &PartKey, snapshot: &Snapshot) -> bool {
        let is_same = self.places.get(key) == Some(&snapshot.slot)
            && matches!(&self.slots[snapshot.slot as usize], Slot::Ready { checksums, .. }
                if Arc::ptr_eq(checksums, &snapshot.checksums));
        if is_same {
            self.remove_place(key);
            self.free_slot(snapshot.slot);
        }
        is_same
    }

    /// Removes all parts of a version, also those on their way. Returns the slots, which are not
    /// free yet, and the flights, to be dropped without the lock.
    pub(crate) fn remove_object(
        &mut self,
        object: ObjectId,
        parts: Range<u32>,
    ) -> (Vec<u32>, Vec<Flight>) {
        let flights = self.flights.extract_if(|key, _| key.object == object);
        let flights = flights.map(|(_, flight)| flight).collect();
        let keys: Vec<PartKey> = if parts.len() <= self.places.len() {
            parts.map(|number| PartKey { object, number }).collect()
        } else {
            self.places.keys().filter(|key| key.object == object).copied().collect()
        };
        (self.remove_places(&keys), flights)
    }

    /// Removes all parts of some objects, like [`Table::remove_object`].
    pub(crate) fn remove_objects(&mut self, ids: &HashSet<ObjectId>) -> (Vec<u32>, Vec<Flight>) {
        let flights = self.flights.extract_if(|key, _| ids.contains(&key.object));
        let flights = flights.map(|(_, flight)| flight).collect();
        let keys = self.places.keys().filter(|key| ids.contains(&key.object));
        let keys: Vec<PartKey> = keys.copied().collect();
        (self.remove_places(&keys), flights)
    }

    fn remove_places(&mut self, keys: &[PartKey]) -> Vec<u32> {
        let slots: Vec<u32> = keys.iter().filter_map(|key| self.remove_place(key)).collect();
        for &slot in &slots {
            self.slots[slot as usize] = Slot::Busy;
            self.states.change(slot);
        }
        slots
    }

    /// Returns how many parts are cached.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Layout;
    use super::*;

    fn table(slots: u32) -> Table {
        let layout = Layout { part_bytes: 4096, block_bytes: 4096, slots };
        Table::new(slots, Arc::new(SlotStates::new(&layout)))
    }

    fn key(number: u32) -> PartKey {
        PartKey { object: [1; 16], number }
    }

    fn insert(table: &mut Table, number: u32) -> Taken {
        let taken = table.take_slot().expect("a slot");
        let checksums = [u64::from(number)].into();
        let record = Record { key: key(number), length_bytes: 10, checksums };
        table.publish(taken.slot, record, &Path::from("object"));
        taken
    }

    fn holds(table: &Table, number: u32) -> bool {
        table.places.contains_key(&key(number))
    }

    #[test]
    fn a_part_that_is_read_survives_a_scan() {
        let mut table = table(4);
        for number in 0..100 {
            insert(&mut table, number);
            assert!(matches!(table.find(&key(0)), Place::Slot(_)), "after part {number}");
        }
        assert_eq!((table.len(), table.objects[&[1; 16]].parts), (4, 4));
    }

    #[test]
    fn slots_being_written_are_not_taken_again() {
        let mut table = table(2);
        let (first, second) = (table.take_slot().unwrap(), table.take_slot().unwrap());
        assert_ne!(first.slot, second.slot);
        assert!(table.take_slot().is_none());
        table.free_slot(second.slot);
        assert_eq!(table.take_slot().unwrap().slot, second.slot);
    }

    #[test]
    fn a_removed_object_leaves_no_part_and_its_slots_busy() {
        let mut table = table(3);
        for number in 0..3 {
            insert(&mut table, number);
        }
        let before: Vec<_> = (0..3).map(|slot| table.states.get(slot)).collect();
        let removed = table.remove_object([1; 16], 0..2).0;
        assert_eq!(removed.len(), 2);
        // A read of what was in them finds the change.
        for slot in 0..3 {
            let is_unchanged = table.states.get(slot).is_unchanged(before[slot as usize]);
            assert_eq!(is_unchanged, !removed.contains(&slot), "slot {slot}");
        }
        assert!(!holds(&table, 0) && !holds(&table, 1) && holds(&table, 2));
        assert_eq!(table.remove_object([1; 16], 0..u32::MAX).0.len(), 1);
        assert_eq!((table.len(), table.objects.len()), (0, 0));
        assert!(table.take_slot().is_none());
    }

    #[test]
    fn a_wrong_part_is_removed_only_from_its_own_slot() {
        let mut table = table(1);
        insert(&mut table, 0);
        let Place::Slot(old) = table.find(&key(0)) else { panic!("part 0 is cached") };
        insert(&mut table, 1);
        insert(&mut table, 0);
        assert!(!table.remove_wrong(&key(0), &old));
        let Place::Slot(new) = table.find(&key(0)) else { panic!("part 0 is cached") };
        assert!(table.remove_wrong(&key(0), &new));
        assert_eq!((table.len(), table.free.len()), (0, 1));
    }
}

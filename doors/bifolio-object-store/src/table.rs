//! The table of parts: which slot each cached part is in, and which parts are being fetched.
//!
//! One lock covers both, so that a part is never fetched twice: it leaves the fetches in the same
//! step in which it appears in a slot. Slots of a region (`keep.rs`) are reused in the order of CLOCK:
//! a slot that was read since the hand passed it last gets a second chance. A new part has none yet,
//! so that a scan does not evict what is read again and again.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use object_store::path::Path;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::keep::{Home, Region};
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
    pub(crate) kept_blocks: Range<u32>,
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
        /// `None` until the part is found first after a restart.
        kept_blocks: Option<Range<u32>>,
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

/// The slots of a region.
#[derive(Debug)]
struct RegionSlots {
    slots: Range<u32>,
    free: Vec<u32>,
    hand: u32,
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
    /// All slots of kept parts, and as many of the last region as have been used.
    slots: Vec<Slot>,
    states: Arc<SlotStates>,
    regions: Vec<RegionSlots>,
    flights: HashMap<PartKey, Flight>,
    next_flight: u64,
}

impl Table {
    pub(crate) fn new(regions: &[Region], states: Arc<SlotStates>) -> Self {
        let regions = regions.iter().map(|region| {
            let slots = region.slots.clone();
            // Those of kept parts, the first one on top; the last region grows.
            let free = if region.class.is_some() { slots.clone().rev().collect() } else { vec![] };
            RegionSlots { hand: slots.start, slots, free }
        });
        let regions: Vec<_> = regions.collect();
        let kept_slots = regions.last().map_or(0, |last| last.slots.start);
        Self {
            places: HashMap::new(),
            objects: HashMap::new(),
            slots: (0..kept_slots).map(|_| Slot::Free).collect(),
            states,
            regions,
            flights: HashMap::new(),
            next_flight: 0,
        }
    }

    /// Returns where a part is, and marks its slot as used. A part that is to be kept and is in a slot
    /// of another region, since an earlier process did not keep it, is absent.
    pub(crate) fn find(&mut self, key: &PartKey, home: &Home) -> Place {
        if let Some(&slot) = self.places.get(key)
            && let is_at_home = self.regions[home.region].slots.contains(&slot)
            && (is_at_home || self.is_last(home.region))
            && let Slot::Ready { length_bytes, checksums, kept_blocks, is_used, .. } =
                &mut self.slots[slot as usize]
        {
            // A part that is not kept leaves the slot of a kept one when the hand comes.
            *is_used |= is_at_home;
            let (length_bytes, checksums) = (*length_bytes, Arc::clone(checksums));
            let state = self.states.get(slot);
            let kept_blocks = kept_blocks.get_or_insert_with(|| home.kept_blocks.clone()).clone();
            return Place::Slot(Snapshot { slot, length_bytes, checksums, kept_blocks, state });
        }
        self.find_flight(key)
    }

    /// Returns `true` if a part is in no slot and not on its way.
    pub(crate) fn is_absent(&self, key: &PartKey) -> bool {
        !self.places.contains_key(key) && matches!(self.find_flight(key), Place::Absent)
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

    fn is_last(&self, region: usize) -> bool {
        region + 1 == self.regions.len()
    }

    /// Takes a slot of a region for a new part, evicting another one if none is free. Returns `None`
    /// if all its slots are being written.
    pub(crate) fn take_slot(&mut self, region: usize) -> Option<Taken> {
        let taken = self.find_slot(region)?;
        self.states.change(taken.slot);
        Some(taken)
    }

    fn find_slot(&mut self, region: usize) -> Option<Taken> {
        let is_last = self.is_last(region);
        let RegionSlots { slots, free, hand } = &mut self.regions[region];
        if let Some(slot) = free.pop() {
            self.slots[slot as usize] = Slot::Busy;
            return Some(Taken { slot, evicted_bytes: 0 });
        }
        if is_last && self.slots.len() < slots.end as usize {
            self.slots.push(Slot::Busy);
            return Some(Taken { slot: self.slots.len() as u32 - 1, evicted_bytes: 0 });
        }
        for _ in 0..2 * slots.len() {
            let slot = *hand;
            *hand = if slot + 1 < slots.end { slot + 1 } else { slots.start };
            match &mut self.slots[slot as usize] {
                Slot::Ready { is_used, .. } if *is_used => *is_used = false,
                Slot::Ready { key, length_bytes, .. } => {
                    let taken = Taken { slot, evicted_bytes: *length_bytes };
                    let key = *key;
                    self.remove_place(&key);
                    self.slots[slot as usize] = Slot::Busy;
                    return Some(taken);
                }
                Slot::Free | Slot::Busy => {}
            }
        }
        None
    }

    /// Makes a part that was written to its slot readable, or that is there after a restart: then its
    /// kept blocks are not known. Returns `true` if it is the first one of its object.
    pub(crate) fn publish(
        &mut self,
        slot: u32,
        record: Record,
        kept_blocks: Option<Range<u32>>,
        location: &Path,
    ) -> bool {
        let Record { key, length_bytes, checksums } = record;
        let checksums = checksums.into();
        self.slots[slot as usize] =
            Slot::Ready { key, length_bytes, checksums, kept_blocks, is_used: false };
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

    /// Restores the slots from the first one on, with what their records say. A part without a name
    /// is not restored. One that was kept later is in two slots, the kept one first.
    pub(crate) fn restore(
        &mut self,
        records: impl IntoIterator<Item = Option<Record>>,
        names: &HashMap<ObjectId, Path>,
    ) {
        let kept_slots = self.slots.len();
        for (slot, record) in (0_u32..).zip(records) {
            if slot as usize >= self.slots.len() {
                self.slots.push(Slot::Busy);
            }
            let record = record.filter(|record| !self.places.contains_key(&record.key));
            match record.and_then(|record| Some((names.get(&record.key.object)?, record))) {
                Some((location, record)) => {
                    self.publish(slot, record, None, location);
                }
                // Those of kept parts are free already.
                None if (slot as usize) < kept_slots => {}
                None => self.free_slot(slot),
            }
        }
        let Self { slots, regions, .. } = self;
        for region in regions {
            region.free.retain(|slot| matches!(slots[*slot as usize], Slot::Free));
        }
    }

    pub(crate) fn free_slot(&mut self, slot: u32) {
        self.slots[slot as usize] = Slot::Free;
        let region = self.regions.partition_point(|region| region.slots.end <= slot);
        self.regions[region].free.push(slot);
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
        with_regions(&[Region { slots: 0..slots, class: None }])
    }

    fn with_regions(regions: &[Region]) -> Table {
        let slots = regions.last().unwrap().slots.end;
        let layout = Layout { part_bytes: 4096, block_bytes: 4096, slots };
        Table::new(regions, Arc::new(SlotStates::new(&layout)))
    }

    fn key(number: u32) -> PartKey {
        PartKey { object: [1; 16], number }
    }

    fn home(region: usize) -> Home {
        Home { region, kept_blocks: 0..1 }
    }

    fn record(number: u32) -> Record {
        Record { key: key(number), length_bytes: 10, checksums: [u64::from(number)].into() }
    }

    fn insert(table: &mut Table, number: u32) -> Taken {
        insert_in(table, number, 0)
    }

    fn insert_in(table: &mut Table, number: u32, region: usize) -> Taken {
        let taken = table.take_slot(region).expect("a slot");
        table.publish(taken.slot, record(number), Some(0..0), &Path::from("object"));
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
            assert!(matches!(table.find(&key(0), &home(0)), Place::Slot(_)), "after part {number}");
        }
        assert_eq!((table.len(), table.objects[&[1; 16]].parts), (4, 4));
    }

    #[test]
    fn slots_being_written_are_not_taken_again() {
        let mut table = table(2);
        let (first, second) = (table.take_slot(0).unwrap(), table.take_slot(0).unwrap());
        assert_ne!(first.slot, second.slot);
        assert!(table.take_slot(0).is_none());
        table.free_slot(second.slot);
        assert_eq!(table.take_slot(0).unwrap().slot, second.slot);
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
        assert!(table.take_slot(0).is_none());
    }

    #[test]
    fn a_wrong_part_is_removed_only_from_its_own_slot() {
        let mut table = table(1);
        insert(&mut table, 0);
        let Place::Slot(old) = table.find(&key(0), &home(0)) else { panic!("part 0 is cached") };
        insert(&mut table, 1);
        insert(&mut table, 0);
        assert!(!table.remove_wrong(&key(0), &old));
        let Place::Slot(new) = table.find(&key(0), &home(0)) else { panic!("part 0 is cached") };
        assert!(table.remove_wrong(&key(0), &new));
        assert_eq!((table.len(), table.regions[0].free.len()), (0, 1));
    }

    #[test]
    fn parts_take_slots_of_their_own_region_only() {
        let regions = [0..2, 2..5].map(|slots| Region { slots, class: None });
        let kept = Region { class: Some("kept".into()), ..regions[0].clone() };
        let mut table = with_regions(&[kept, regions[1].clone()]);
        for number in 0..2 {
            assert!(insert_in(&mut table, number, 0).slot < 2);
        }
        for number in 10..100 {
            let slot = insert_in(&mut table, number, 1).slot;
            assert!(slot >= 2, "part {number} is in slot {slot}");
        }
        assert!(holds(&table, 0) && holds(&table, 1) && table.len() == 5);
        // A third one takes the slot of another kept one, which was not read.
        assert!(matches!(table.find(&key(0), &home(0)), Place::Slot(_)));
        insert_in(&mut table, 2, 0);
        assert!(holds(&table, 0) && !holds(&table, 1) && holds(&table, 2) && holds(&table, 99));
    }

    #[test]
    fn a_restored_part_that_is_kept_now_is_absent_and_others_lose_the_slots_of_kept_ones() {
        let kept = Region { slots: 0..2, class: Some("kept".into()) };
        let mut table = with_regions(&[kept, Region { slots: 2..9, class: None }]);
        let names = HashMap::from([([1; 16], Path::from("object"))]);
        // Part 4 was kept, and is in two slots.
        let records = [Some(record(0)), Some(record(4)), None, Some(record(4)), Some(record(5))];
        table.restore(records, &names);
        assert_eq!((table.len(), table.slots.len()), (3, 5));
        assert!(matches!(table.find(&key(5), &home(0)), Place::Absent));
        assert!(matches!(table.find(&key(5), &home(1)), Place::Slot(_)));
        let Place::Slot(found) = table.find(&key(4), &home(0)) else { panic!("part 4 is kept") };
        // Its blocks stay where its first reader has found them.
        let again = table.find(&key(4), &Home { region: 0, kept_blocks: 0..0 });
        let Place::Slot(again) = again else { panic!("part 4 is kept") };
        assert_eq!((found.slot, found.kept_blocks, again.kept_blocks), (1, 0..1, 0..1));
        // Part 0 is in the slot of a kept one, which it gives up although it is read.
        assert!(matches!(table.find(&key(0), &home(1)), Place::Slot(_)));
        assert_eq!(insert_in(&mut table, 6, 0).slot, 0);
        assert!(!holds(&table, 0) && holds(&table, 4));
        let slots: HashSet<u32> = (10..16).map(|it| insert_in(&mut table, it, 1).slot).collect();
        assert_eq!(slots.len(), 6);
        assert!(slots.iter().all(|slot| *slot >= 2) && holds(&table, 5));
    }
}

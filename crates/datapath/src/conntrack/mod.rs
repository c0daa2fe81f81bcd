//! Flow records in user space: expiry (`gc`), removal after an edit (`flush`), and resets for idle pods whose connections were
//! cut (`idle_reset`).

pub mod flush;
pub mod gc;
pub mod idle_reset;

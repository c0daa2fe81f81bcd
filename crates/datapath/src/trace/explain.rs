//! Why a packet is treated as it is: `egress-agent trace`, without the kernel.
//!
//! A trace has two witnesses, which know nothing of each other:
//!
//! - the **programs** that are loaded, run on a made packet over copies of what they write (`dataplane::trace`). They say
//!   what becomes of the packet, and nothing of why;
//! - the **decision** of `egress_common::decide`, the same code that the programs are made of, asked on the host over what
//!   the maps hold ([`witness`]). Every question that it asks of a map is kept with its answer, in order: these are the
//!   questions of the road ([`questions`]), and nobody has to keep a second list of them in step.
//!
//! What the decision foresees ([`foresee`]) must hold what the programs say. Where it does not, one of the two is wrong, and
//! the trace says so: that is a defect, or the maps changed in between.
//!
//! | file | what |
//! |---|---|
//! | `probe` | the made packet |
//! | `witness`, `questions` | the decision's questions, as values and in words |
//! | `foresee` | what the decision leaves open for the programs to say |
//! | `advice` | what to do about a verdict |
//! | `report` | all of it, for people and for programs |

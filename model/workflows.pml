/* FINISH and NEEDS: batches A (two members) and B (one), and D (one), which needs both. Two workers that may die anywhere, and
   an operator who retries a failed member whenever it has failed, and who cancels D's member and retries it.

   A statement of jsworker/ownership/transitions/workflows.py is two steps: it looks (its snapshot), and it writes, when
   PostgreSQL checks the locked row once more and nothing else. A flag takes a protection away. */

#ifndef K
#define K 2            /* deaths of workers, and rows that somebody has locked, in all */
#endif

#ifndef CANCELS
#define CANCELS 0      /* of D's member, by the operator */
#endif

#define A 0
#define B 1
#define D 2

mtype { LIVE, COMPLETED, FAILED, CANCELLED, HELD };
mtype member[4];       /* 0 and 1 are A's, 2 is B's, 3 is D's */
bool finished[3], failed[3], propagated[3];
byte generation[3], revision, ends[3], faults, retries, cancels;
bool by_itself;        /* D's member was cancelled by the operator, not for its needs */
bool operator_left;

#define IS_LIVE(i) (member[i] == LIVE || member[i] == HELD)
#define HAS_LIVE(b) ((b == A && (IS_LIVE(0) || IS_LIVE(1))) || (b == B && IS_LIVE(2)) || (b == D && IS_LIVE(3)))
#define BATCH(i) (i < 2 -> A : (i == 2 -> B : D))
#define READY (finished[A] && finished[B])

#ifdef NO_GENERATION
#define SAME_GENERATION true
#else
#define SAME_GENERATION (generation[b] == seen)
#endif
#ifdef NO_REVISION
#define SAME_REVISION true
#else
#define SAME_REVISION (revision == rule)
#endif
#ifdef PROPAGATED_BLIND
#define LEFT_NOTHING true
#else
#define LEFT_NOTHING (!(READY && member[3] == HELD))
#endif
#ifdef NO_SWEEP
#define SWEEPS false
#else
#define SWEEPS true
#endif

#define MAY_DIE faults < K -> faults++; goto idle

#define HAS_FAILED(b) ((b == A && (member[0] == FAILED || member[1] == FAILED)) || (b == D && member[3] == CANCELLED))

inline finish_looks() { seen = generation[b]; can = !HAS_LIVE(b) && !finished[b]; runs = !HAS_FAILED(b) }
inline needs_looks() { rule = revision; can = READY; runs = !(failed[A] || failed[B]) }

proctype worker() {
	byte i, b, seen, rule;
	bool can, runs;
idle:
	atomic { i = 0; b = 0; seen = 0; rule = 0; can = false; runs = false };
end:
	if
	/* It settles a member, and looks after its batch. */
	:: atomic { member[0] == LIVE -> i = 0 }
	:: atomic { member[1] == LIVE -> i = 1 }
	:: atomic { member[2] == LIVE -> i = 2 }
	:: atomic { member[3] == LIVE -> i = 3 }
	/* Or its scan finds what was left. */
	:: atomic { SWEEPS && !HAS_LIVE(A) && !finished[A] -> b = A; goto looks }
	:: atomic { SWEEPS && !HAS_LIVE(B) && !finished[B] -> b = B; goto looks }
	:: atomic { SWEEPS && !HAS_LIVE(D) && !finished[D] -> b = D; goto looks }
	:: atomic { SWEEPS && finished[A] && !propagated[A] -> b = A; seen = generation[A]; goto needs }
	:: atomic { SWEEPS && finished[B] && !propagated[B] -> b = B; seen = generation[B]; goto needs }
	fi;
	b = BATCH(i);
#ifdef IN_SETTLE
	atomic { finish_looks() };     /* with the snapshot of the settle */
#endif
	if
	:: atomic { member[i] == LIVE -> member[i] = COMPLETED }
	:: atomic { member[i] == LIVE && i == 0 && retries < 2 -> member[i] = FAILED }
	:: atomic { member[i] != LIVE -> goto idle }   /* another was faster */
	fi;
	if
	:: true
	:: atomic { MAY_DIE }
	fi;
#ifdef IN_SETTLE
	goto writes;
#endif
looks:
	atomic { finish_looks() };
writes:
#ifdef NEEDS_IN_FINISH
	/* One statement: what it knows of the other need is of the same snapshot. */
	atomic { needs_looks(); can = can || (b == A && finished[B]) || (b == B && finished[A]) };
	atomic {
		if
		:: !finished[b] && !HAS_LIVE(b) ->
		   finished[b] = true; ends[b]++; propagated[b] = true;
		   if
		   :: b != D && can && member[3] == HELD -> member[3] = LIVE
		   :: else
		   fi
		:: else
		fi;
		goto idle
	};
#endif
	atomic {
		if
		:: can && !finished[b] && SAME_GENERATION ->
		   assert(!HAS_LIVE(b));
		   finished[b] = true;
		   failed[b] = !runs;
		   propagated[b] = (b == D);
		   ends[b]++;
		   assert(ends[b] == generation[b] + 1 || ends[b] <= generation[b])
		:: else -> goto idle
		fi
	};
	if
	:: b == D -> goto idle
	:: b != D
	:: atomic { MAY_DIE }
	fi;
needs:
	atomic { needs_looks() };
	atomic {
		if
		:: can && SAME_REVISION && member[3] == HELD ->
		   assert(READY);              /* nothing is woken, or cancelled, for what runs again */
		   member[3] = (runs -> LIVE : CANCELLED)
		:: can && faults < K -> faults++    /* somebody has locked the row: it is passed over */
		:: else
		fi
	};
	if
	:: true
	:: atomic { MAY_DIE }
	fi;
	/* It has come to its end, unless D's member is held and need not be. */
	atomic { rule = revision; can = finished[b] && LEFT_NOTHING };
	atomic {
		if
		:: can && SAME_REVISION && SAME_GENERATION && finished[b] -> propagated[b] = true
		:: else
		fi
	};
	/* What was cancelled finishes its own batch. */
	if
	:: atomic { member[3] == CANCELLED && !finished[D] -> b = D; goto looks }
	:: atomic { !(member[3] == CANCELLED && !finished[D]) -> goto idle }
	fi
}

/* One transaction, which keeps the workflow's row locked: the other statements that need it do nothing meanwhile. */
active proctype operator() {
	do
	:: atomic {
		member[0] == FAILED && retries < 2 ->
		retries++;
		revision++;
		member[0] = LIVE;
#ifndef NO_REOPEN
		finished[A] = false; generation[A]++; propagated[A] = false;
#else
		generation[A]++;
#endif
#ifndef NOT_HELD_AGAIN
		if
		:: member[3] == CANCELLED && !by_itself ->
		   member[3] = HELD; finished[D] = false; generation[D]++; propagated[B] = false
		:: else
		fi
#endif
	   }
	:: atomic { cancels < CANCELS && IS_LIVE(3) -> cancels++; member[3] = CANCELLED; by_itself = true }
	/* Its needs may have failed meanwhile, or not have finished: then it is held, and they are looked at once more. */
	:: atomic {
		by_itself ->
		by_itself = false;
		revision++;
		finished[D] = false; generation[D]++;
		member[3] = (READY && !failed[A] && !failed[B] -> LIVE : HELD);
		if
		:: finished[A] -> propagated[A] = false
		:: else
		fi;
		if
		:: finished[B] -> propagated[B] = false
		:: else
		fi
	   }
	:: atomic { !by_itself &&
	            (retries == 2 || (finished[A] && finished[B] && finished[D] && member[0] != FAILED)) ->
	            operator_left = true; break }
	od
}

init {
	atomic {
		member[0] = LIVE; member[1] = LIVE; member[2] = LIVE; member[3] = HELD;
		run worker(); run worker()
	}
}

/* With all retries used up, each batch has finished, and D ran: what it needs has completed in the end. */
#define FINAL (operator_left && finished[A] && finished[B] && finished[D] && member[3] == COMPLETED)

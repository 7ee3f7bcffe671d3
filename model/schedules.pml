/* FIRE: a schedule, two workers that may die anywhere, a clock that may go back, code that changes the rule.

   Instants are 1 .. LAST. The rule is every instant (revision 1), after a change every second one (revision 2).
   Each statement of jsworker/ownership/transitions/schedules.py is one atomic step; what a worker has read before
   it may be out of date. A flag takes a protection away. */

#define LAST 4

#ifndef K
#define K 2            /* deaths of workers and steps back of the clock, in all */
#endif

byte clock, next_at = 1, last, revision = 1, faults;
byte fired[LAST + 3];
bool is_changed;

/* The clock may have gone back before the rule was changed: its first instant may have had its job. */
#ifdef NO_LATER
#define LATER(instant) true
#else
#define LATER(instant) (instant > last)
#endif

/* What has a job gets no second one, and only what its rule has gets one. */
inline insert(instant) {
	if
	:: LATER(instant) ->
	   last = instant;
	   fired[instant]++;
	   assert(fired[instant] == 1);
	   assert(revision == 1 || instant % 2 == 0)
	:: else
	fi
}

/* The guard: the row stands at the instant that was read, under the rule that was read, and is due. */
#ifdef NO_SEEN
#define SEEN true
#else
#define SEEN (next_at == due)
#endif
#ifdef NO_REVISION
#define UNCHANGED true
#else
#define UNCHANGED (revision == rule)
#endif
#define MAY (SEEN && UNCHANGED && next_at <= clock)

active [2] proctype worker() {
	byte due, rule;
end:
	do
	:: atomic { next_at <= clock && next_at <= LAST -> due = next_at; rule = revision };
#if defined(INSERT_FIRST)
	   if
	   :: atomic { MAY -> insert(due) };
	      if
	      :: next_at = due + rule
	      :: atomic { faults < K -> faults++ }
	      fi
	   :: atomic { !MAY -> skip }
	   fi
#elif defined(MOVE_FIRST)
	   if
	   :: atomic { MAY -> next_at = due + rule };
	      if
	      :: atomic { insert(due) }
	      :: atomic { faults < K -> faults++ }
	      fi
	   :: atomic { !MAY -> skip }
	   fi
#else
	   if
	   :: atomic { MAY -> insert(due); next_at = due + rule }
	   :: atomic { faults < K -> faults++ }        /* it dies before; after, there is nothing left to do */
	   :: atomic { !MAY -> skip }
	   fi
#endif
	   due = 0; rule = 0
	od
}

active proctype time() {
	do
	:: clock < LAST -> clock++
	:: atomic { faults < K && clock > 0 -> faults++; clock-- }
	:: clock == LAST -> break
	od
}

/* Code with another rule, from its first instant after the present one on; what the old one has due is not run. */
active proctype change() {
	if
	:: atomic {
		revision = 2; is_changed = true; next_at = (clock / 2 + 1) * 2;
#ifdef FORGETS
		last = (last > clock -> 0 : last)   /* as an operator's resume does */
#endif
	   }
	:: true
	fi
}

/* Every instant of a rule that stays has had its job. */
#define FINAL (next_at > LAST && (is_changed || (fired[1] == 1 && fired[2] == 1 && fired[3] == 1 && fired[4] == 1)))
